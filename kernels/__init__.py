"""What runs on the GPU. Knows torch, and nothing of ComfyUI."""
