"""Memory of batches is used again, and never while anybody holds the batch."""

import gc
import threading

import torch

from torchtitan.models.dit_tts.data.buffer_pool import BufferPool


def test_memory_comes_back_when_the_last_view_is_gone():
    memory = BufferPool(24)
    tensor = memory.tensor(2, 3, 4)
    assert tensor.shape == (2, 3, 4) and tensor.dtype == torch.float32
    address = tensor.data_ptr()
    view = tensor[1]
    del tensor
    gc.collect()
    other = memory.tensor(5)  # the view still holds the first block
    assert other.data_ptr() != address
    view.fill_(7)
    other.fill_(1)
    assert (view == 7).all()
    del view
    gc.collect()
    assert memory.tensor(6, 4).data_ptr() == address


def test_arrays_over_a_tensor_hold_its_memory():
    memory = BufferPool(8)
    array = memory.tensor(8).numpy()
    array[:] = 3
    memory.tensor(8).fill_(0)
    assert (array == 3).all()


def test_threads_never_share_a_block():
    memory = BufferPool(1000)
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = memory.tensor(1000)
            tensor.fill_(number)
            if not (tensor == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
