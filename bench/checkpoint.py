"""A FLUX.1 file with random weights, for whoever wants to test loading without downloading: the keys are Black Forest Labs' own.

    python -m flux_fast_path.bench.checkpoint FILE [--size dev|small|tiny] [--dtype bf16|fp16] [--seed N]

FLUX.1-dev's size takes 24 GB on the disk and twice that in memory while it is written.
"""

import argparse

import torch
from safetensors.torch import save_file

from .reference_flux import SIZES, reference_flux

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def write(path, size="tiny", dtype=torch.bfloat16, seed=0, device="cpu", **params) -> str:
    """Write the file; `params` override those of SIZES[size]. Returns the path."""
    weights = reference_flux(size, dtype, device, seed=seed, **params).state_dict()
    save_file({name.replace("_norm.weight", "_norm.scale"): weights[name].to("cpu").contiguous() for name in list(weights)}, str(path))
    return str(path)


def main(argv=None) -> None:
    p = argparse.ArgumentParser(prog="python -m flux_fast_path.bench.checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file")
    p.add_argument("--size", choices=SIZES, default="dev")
    p.add_argument("--dtype", choices=DTYPES, default="bf16")
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(argv)
    write(options.file, options.size, DTYPES[options.dtype], options.seed, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
