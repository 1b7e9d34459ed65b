"""Where the time goes: tokens per second, model FLOPs utilization (MFU) and peak memory of a training run.

`Meter` times optimizer work alone (evaluation and saving excluded); `peak_flops` is what MFU is measured against.
This file bears the name of a standard-library module that `cProfile`, and through it torch.compile and DCP, import
by that name. So it first hands every name it does not define on to the standard library's own module.

    python profile.py              # this machine's matrix-product peak by dtype
"""


def __getattr__(name):
    """A name this module does not define, looked up in the standard library's `profile`, loaded from its own file."""
    import importlib.util
    import os
    import sysconfig
    if "_standard" not in globals():
        path = os.path.join(sysconfig.get_path("stdlib"), "profile.py")
        spec = importlib.util.spec_from_file_location("_standard_profile", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        globals()["_standard"] = module
    return getattr(globals()["_standard"], name)


# torch is imported inside the functions: `python -m cProfile` should not wait for it.
import time
import timeit

# Dense bf16/fp16 TFLOP/s by a part of the device's name, from the vendors' data sheets (sparse figures are twice that).
# The first match counts, so a longer name stands before the shorter one it contains.
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "MI300X": 1307,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71,
}


def peak_flops(device, dtype):
    """(FLOP/s, where the figure is from): the data sheet's for a known GPU in 16 bits, otherwise measured here."""
    import torch
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for part, tflops in PEAK_TFLOPS.items():
            if part in name:
                return tflops * 1e12, f"{name}'s dense peak"
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def product():
        a @ b
        synchronize(device)
    seconds = min(timeit.repeat(product, number=1, repeat=4))  # the first call chooses and loads the kernel
    return 2 * size ** 3 / seconds, f"measured here on {size} x {size} matrices"


def synchronize(device):
    """Wait until an accelerator has done what was asked of it; a CPU has already."""
    import torch
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device):
    """Most memory used so far in GB: the allocator's on CUDA, the process's resident set elsewhere, None if unknown."""
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """Throughput between two readings: `start()` when optimizer work begins, `read(tokens)` when some of it is done.

    `flops_per_token` and `peak` (FLOP/s of all devices together) turn tokens per second into MFU.
    """

    def __init__(self, flops_per_token, peak, device):
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.start()

    def start(self):
        """Begin anew; what passed since the last reading (an evaluation, a save) does not count."""
        synchronize(self.device)
        self.since, self.waited = time.perf_counter(), 0.0

    def wait(self, iterator):
        """The iterator's next item; the time it took counts as waiting for data."""
        start = time.perf_counter()
        item = next(iterator)
        self.waited += time.perf_counter() - start
        return item

    def read(self, tokens):
        """Metrics of the `tokens` (of all processes) worked on since the last reading, as metrics.jsonl names them."""
        synchronize(self.device)
        rate = tokens / (time.perf_counter() - self.since)
        metrics = dict(tokens_per_s=rate, mfu=rate * self.flops_per_token / self.peak,
                       peak_mem_gb=peak_memory(self.device), data_wait_s=self.waited)
        self.start()
        return metrics


def main():
    """Print the peak that MFU would be measured against, for each dtype."""
    import torch
    for dtype in torch.float32, torch.bfloat16:
        peak, source = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)
        print(f"{str(dtype)[6:]:9s} {peak / 1e12:8.3f} TFLOP/s  {source}")


if __name__ == "__main__":
    main()
