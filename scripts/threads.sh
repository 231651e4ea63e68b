# Sourced by the scripts that train: sets $precision to what this machine computes fast, and the threads of a CPU.
precision=float32
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    precision=bfloat16
else
    if grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null; then
        precision=bfloat16 # other CPUs emulate it
    fi
    # More threads only wait for each other on so small a model.
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}
    # Keep freed activations in the heap instead of returning them to the kernel: 5 % faster.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184
fi
