"""Many jobs of one function, in processes or on a Ray cluster, in a folder that a kill cannot spoil."""
