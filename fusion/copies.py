"""Finds a second copy of the pack (installed twice under two folder names), which must stay inert: two would mount on each other."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("flux_fast_path")

MARK = "_flux_fast_path_nodes"  # set on the package whose nodes are in use


def another_is_active(package: str) -> bool:
    """Whether another copy's nodes are in use already. Reads module dictionaries only."""
    for name, module in list(sys.modules.items()):
        if name != package and MARK in getattr(module, "__dict__", {}):
            log.warning("FLUX Fast Path is installed twice: %s is in use, %s stays inert. Remove one of the two folders.", name, package)
            return True
    return False


def claim(package: str) -> None:
    """`package` has its nodes: another copy must now stay inert. Not before, or a broken copy would silence a good one."""
    setattr(sys.modules[package], MARK, True)
