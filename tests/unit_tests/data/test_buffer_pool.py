"""Memory of batches is reused, and never while anybody holds the batch."""

import torch

from torchtitan.models.dit_tts.data.buffer_pool import BufferPool


def test_memory_comes_back_when_the_last_view_is_gone():
    pool = BufferPool(24)
    half = BufferPool(3, torch.bfloat16).tensor(3)
    assert half.dtype == torch.bfloat16 and half.shape == (3,)
    tensor = pool.tensor(2, 3, 4)
    assert tensor.shape == (2, 3, 4) and tensor.dtype == torch.float32
    address = tensor.data_ptr()
    array = tensor[1].numpy()
    del tensor
    array.fill(7)
    other = pool.tensor(5)  # the view still holds the first block
    assert other.data_ptr() != address
    other.fill_(1)
    assert (array == 7).all()
    del array
    assert pool.tensor(6, 4).data_ptr() == address
