"""FLUX Fast Path: FLUX in ComfyUI, faster, bit-identical. See README.md."""

__version__ = "0.1.0"

NODE_CLASS_MAPPINGS = {}
NODE_DISPLAY_NAME_MAPPINGS = {}
WEB_DIRECTORY = None

# pytest imports this file from the repository root without a package around it; relative imports cannot work there.
if __package__:
    from .fusion import ascii_log, copies

    ascii_log.install()
    if not copies.another_is_active(__package__):
        from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

        copies.claim(__package__)
        WEB_DIRECTORY = "./web"

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
