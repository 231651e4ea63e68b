"""Before torch is loaded: every test computes on the CPU, for which its bars are, in one thread, and
nothing is read from or left in the user's cache folders."""

import os
import tempfile

_caches = tempfile.TemporaryDirectory(prefix="titan-tts-tests-")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["XDG_CACHE_HOME"] = _caches.name
os.environ["HF_HOME"] = f"{_caches.name}/huggingface"
os.environ.setdefault("OMP_NUM_THREADS", "1")
