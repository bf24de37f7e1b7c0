"""Where in the model the fused kernels run. Knows comfy's names, not its UI."""
