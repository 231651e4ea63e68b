"""Memory, time and MFU of a run before it starts, in closed form: counts are exact, and the constants that
turn them into bytes and seconds were measured on one GPU (`measured`)."""
