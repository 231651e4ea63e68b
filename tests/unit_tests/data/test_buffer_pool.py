"""Memory of batches is reused, and never while anybody holds the batch."""

import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from torchtitan.models.dit_tts.data.buffer_pool import BufferPool


def test_memory_comes_back_when_the_last_view_is_gone():
    pool = BufferPool(24)
    tensor = pool.tensor(2, 3, 4)
    assert tensor.shape == (2, 3, 4) and tensor.dtype == torch.float32
    address = tensor.data_ptr()
    array = tensor[1].numpy()
    del tensor
    gc.collect()
    array.fill(7)
    other = pool.tensor(5)  # the view still holds the first block
    assert other.data_ptr() != address
    other.fill_(1)
    assert (array == 7).all()
    del array
    gc.collect()
    assert pool.tensor(6, 4).data_ptr() == address


def test_threads_never_share_a_block():
    pool = BufferPool(1000)

    def has_own_block(number: int) -> bool:
        tensor = pool.tensor(1000).fill_(number)
        return bool((tensor == number).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(has_own_block, range(800)))
