"""Before torch is loaded: every test computes on the CPU, for which its bars are, in one thread."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
