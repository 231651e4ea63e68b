"""Constants from one measurement, by which a forecast turns counts into bytes and seconds.

All are from benchmarks/results/gpu_check_nvidia_h200.json: one NVIDIA H200, torch 2.11, 2026-11-27, samples of
768 frames, 192 text tokens and 384 reference frames. U is `matmul_bytes`: what the matmuls of a block read
and write in the forward pass, in bfloat16.
"""

DEVICE = "H200"
"""the GPU that was measured; other GPUs are scaled by its peak FLOP/s and its bandwidth"""

DATE = "2026-11-27"

FLOP_FRACTION = 0.690
"""of the bf16 peak, of matmuls and attention together; with the next from the compiled blocks of 800M (9.586 ms)
and 3B (28.653 ms) with 32 samples: 3.7092 and 13.893 TFLOP, and U of 3B is twice that of 800M"""

POINTWISE = {True: 18.4, False: 48.4}
"""by whether blocks are compiled: all else that a block does takes as long as moving that many times U at the
datasheet's bandwidth; eager from the block of 800M (16.363 ms). 3B's eager block is then 5 % too slow"""

FP8_GAIN = 1.70
"""rate of products in fp8 over bf16: 1,094 over 644 TFLOP/s for those of an 800M block. A step was not measured"""

OPTIMIZER_BANDWIDTH = 0.76
"""fraction of the datasheet's: norm, clipping and fused AdamW of 781 million parameters took 8.54 ms"""

HOST_SECONDS = 0.0216
TEXT_ENCODER_SECONDS = 0.027
"""of each micro-batch, whatever its size, in which the GPU waits for the host; the second for the kernels of a
pretrained text encoder. Together what all else in this file leaves of the 297.2 ms of a step. The
measured steps each had a wait for the host that training does not have, so both are upper bounds"""

SAVED_PLAIN = {True: 1.37, False: 2.08}
SAVED = {"memory_budget": 0.95, "selective": 0.70}
"""bytes that a block saves for its backward pass over U, without checkpointing (compiled or not) and with: from the peaks of the
eager step (65.39 GiB) and of the one with a memory budget of 0.9 (37.49 GiB), less the weights' states; compiled as
one block to an eager one (1.513 to 2.303 GiB). `selective` was counted on tensors without data, not measured"""

SAVED_BY_TRITON = 3
"""tensors of a block's size (B, T, D) that [kernels] modulated_norm = "triton" keeps in addition: counted in Inductor's code of
800M without checkpointing (4.5 GB of 24 blocks), not measured"""

REPEATED = {"none": 0.0, "memory_budget": 0.06, "selective": 1 / 6, "full": 1 / 3}
"""fraction of a block's pointwise work that checkpointing repeats, counted in graphs, not measured"""

LINK_FRACTION = 0.75
"""of the links' bandwidth that collectives reach: a guess, because one GPU was measured"""

CONTEXT_BYTES = int(1.5 * 2**30)
FRAGMENTED_FRACTION = 0.04
"""the device's context and buffers, and what the allocator reserves in vain: guesses"""
