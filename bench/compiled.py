"""torch.compile, block by block, as users apply it: the compiled blocks stand in the module lists for the time of a step, on the same weights."""

import time
from contextlib import contextmanager

import torch


class CompiledBlocks:
    def __init__(self, model, backend: str):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        self.swaps = []  # (module list, its blocks, their compiled twins)
        for blocks in (model.double_blocks, model.single_blocks):
            # dynamic=False: each size gets code of its own, which is the faster choice of the two.
            self.swaps.append((blocks, list(blocks), [torch.compile(block, dynamic=False, backend=backend) for block in blocks]))
        self.seconds = self.graphs = None

    @contextmanager
    def mounted(self):
        try:
            for blocks, _, twins in self.swaps:
                for i, twin in enumerate(twins):
                    blocks[i] = twin
            yield
        finally:
            for blocks, originals, _ in self.swaps:
                for i, block in enumerate(originals):
                    blocks[i] = block

    def warm_up(self, call, device) -> None:
        """Compile by calling; `seconds` is what that took beyond running."""
        started = time.perf_counter()
        with self.mounted():
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            first = time.perf_counter() - started
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.seconds = first - (time.perf_counter() - started)
        self.graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs")
