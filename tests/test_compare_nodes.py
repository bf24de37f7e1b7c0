"""FLUX Quality Compare and FLUX Latent Compare: what they call identical, and the numbers they give when it is not."""

import builtins
import math

import numpy as np
import pytest
import torch
from flux_fast_path.nodes.latent_compare import FluxLatentCompare
from flux_fast_path.nodes.quality_compare import FluxQualityCompare


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(7)
    smooth = torch.nn.functional.interpolate(torch.rand(2, 3, 12, 16, generator=generator), size=(96, 128), mode="bicubic")
    return smooth.clamp(0, 1).movedim(1, -1).contiguous()


def noisy(images, strength=0.05, seed=8):
    return (images + strength * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))).clamp(0, 1)


def compare_images(a, b, amplify=10.0):
    answer = FluxQualityCompare().compare(a, b, amplify)
    return (*answer["result"], answer["ui"]["text"][0])


def compare_latents(a, b):
    return FluxLatentCompare().compare({"samples": a}, {"samples": b})["result"]


def flip_lowest_bit(tensor, index=0):
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flipped = tensor.clone()
    flipped.view(whole).view(-1)[index] ^= 1
    return flipped


def test_identical_images_have_infinite_psnr_and_ssim_of_one(images):
    identical, psnr, ssim, _, text = compare_images(images, images.clone())
    assert identical is True and psnr == math.inf and ssim == 1.0
    assert text == "Identical: every bit of every pixel is the same (2 images, 128 × 96)."


def test_one_flipped_bit_makes_images_not_identical(images):
    identical, psnr, ssim, _, text = compare_images(images, flip_lowest_bit(images, 500))
    assert identical is False and 120 < psnr < math.inf and ssim == pytest.approx(1.0, abs=1e-5)
    assert text.startswith("Not identical: 1 of 2 images differ")


def test_a_negative_zero_is_not_identical_but_no_pixel_differs():
    zero = torch.zeros(1, 16, 16, 3)
    identical, psnr, _, _, text = compare_images(zero, -zero)
    assert identical is False and psnr == math.inf
    assert "only the sign of a zero differs" in text


@pytest.mark.parametrize("offset", [0.5, 0.1, 1 / 255])
def test_psnr_of_a_constant_offset_is_minus_twenty_log_ten_of_it(offset):
    grey = torch.full((1, 32, 32, 3), 0.25)
    _, psnr, _, _, _ = compare_images(grey, grey + offset)
    assert psnr == pytest.approx(-20 * math.log10(offset), abs=1e-4)


def test_psnr_agrees_with_scikit_image(images):
    metrics = pytest.importorskip("skimage.metrics")
    other = noisy(images)
    _, psnr, _, _, _ = compare_images(images, other)
    expected = [metrics.peak_signal_noise_ratio(a.numpy(), b.numpy(), data_range=1.0) for a, b in zip(images, other)]
    assert psnr == pytest.approx(np.mean(expected), abs=1e-3)


@pytest.mark.parametrize("strength", [0.005, 0.05, 0.3])
def test_ssim_agrees_with_scikit_image(images, strength):
    metrics = pytest.importorskip("skimage.metrics")
    pytest.importorskip("kornia")
    other = noisy(images, strength)
    _, _, ssim, _, _ = compare_images(images, other)
    expected = [
        metrics.structural_similarity(
            a.numpy(), b.numpy(), data_range=1.0, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for a, b in zip(images, other)
    ]
    assert ssim == pytest.approx(np.mean(expected), abs=1e-3)


def test_a_batch_gives_means_and_names_the_worst_image(images):
    pair = torch.stack([noisy(images[:1], 0.01)[0], noisy(images[1:], 0.2)[0]])
    singles = [compare_images(images[i : i + 1], pair[i : i + 1]) for i in range(2)]
    _, psnr, ssim, picture, text = compare_images(images, pair)
    assert psnr == pytest.approx((singles[0][1] + singles[1][1]) / 2)
    assert ssim == pytest.approx((singles[0][2] + singles[1][2]) / 2)
    assert f"lowest {singles[1][1]:.2f} dB, image 2" in text
    assert picture.shape[0] == 2


def test_an_identical_pair_does_not_make_the_mean_of_the_batch_infinite(images):
    pair = torch.stack([images[0], noisy(images[1:], 0.2)[0]])
    _, psnr, _, _, _ = compare_images(images, pair)
    assert psnr == pytest.approx(compare_images(images[1:], pair[1:])[1])


def test_a_single_image_is_compared_with_every_image_of_a_batch(images):
    identical, _, _, picture, text = compare_images(images[:1], images)
    assert identical is False and picture.shape[0] == 2 and "1 of 2 images differ" in text
    assert compare_images(images, images[:1])[0] is False


def test_images_of_different_size_are_refused_with_both_sizes_named(images):
    with pytest.raises(ValueError, match=r"image A is 128 × 96 pixels .* image B is 64 × 96 pixels"):
        compare_images(images, images[:, :, :64])


def test_batches_of_different_size_are_refused_with_both_numbers_named(images):
    with pytest.raises(ValueError, match="A holds 2 images and B holds 3"):
        compare_images(images, torch.cat([images, images[:1]]))


@pytest.mark.filterwarnings("error")
def test_an_image_with_nan_is_called_broken_and_does_not_raise(images):
    broken = images.clone()
    broken[0, 3, 4, 1] = math.nan
    identical, psnr, ssim, picture, text = compare_images(images, broken)
    assert identical is False and math.isnan(psnr) and math.isnan(ssim)
    assert "1 values are NaN or infinite" in text and picture.isfinite().all()


def test_the_same_nan_in_both_images_is_identical(images):
    images[0, 0, 0, 0] = math.nan
    assert compare_images(images, images.clone())[:3] == (True, math.inf, 1.0)


def test_number_formats_that_hold_the_same_values_are_identical(images):
    half = images.half()
    assert compare_images(half, half.float())[0] is True


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 7, 5, 3), (1, 10, 40, 4), (1, 20, 20, 1)], ids=str)
def test_small_images_and_other_channel_counts_are_compared(shape):
    a = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    _, psnr, ssim, picture, _ = compare_images(a, a * 0.9)
    assert math.isfinite(psnr) and math.isfinite(ssim)
    assert picture.shape[2:] == (3 * shape[2], 3) and picture.shape[1] > shape[1]


def test_the_picture_shows_a_then_b_then_the_amplified_difference_and_a_legend():
    a = torch.zeros(1, 64, 80, 3)
    b = a.clone()
    b[:, :, 40:] = 0.1
    _, _, _, picture, _ = compare_images(a, b, amplify=10.0)
    assert picture.dtype == torch.float32 and 0 <= picture.min() and picture.max() <= 1
    assert not picture[0, :64, :80].any()
    assert picture[0, :64, 120:160].mean() == pytest.approx(0.1, abs=0.01)
    assert not picture[0, :64, 160:200].any()
    assert (picture[0, :64, 200:] == 1.0).all()
    assert picture[0, 64:].std() > 0


def test_amplify_changes_the_picture_and_never_the_numbers(images):
    other = noisy(images)
    little, much = compare_images(images, other, 1.0), compare_images(images, other, 100.0)
    assert little[:3] == much[:3] and not torch.equal(little[3], much[3])


@pytest.mark.parametrize("given, drawn", [(0, 1.0), (-5.0, 1.0), (math.nan, 10.0), (math.inf, 1000.0), (1e9, 1000.0), (None, 10.0), (7, 7.0)], ids=str)
@pytest.mark.filterwarnings("error")
def test_an_amplify_that_a_link_brings_past_the_widget_is_brought_into_its_limits(images, given, drawn):
    other = noisy(images)
    answer, expected = compare_images(images, other, given), compare_images(images, other, drawn)
    assert answer[:3] == expected[:3] and torch.equal(answer[3], expected[3])


def test_a_missing_kornia_is_named_with_what_to_do(images, monkeypatch):
    real = builtins.__import__

    def without_kornia(name, *args, **kwargs):
        if name.startswith("kornia"):
            raise ImportError("No module named 'kornia'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_kornia)
    with pytest.raises(RuntimeError, match="Install ComfyUI's requirements again"):
        compare_images(images, noisy(images))
    assert compare_images(images, images)[0] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_flipped_bit_makes_latents_not_equal(dtype):
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert compare_latents(latent, latent.clone())[:3] == (True, 0.0, 0.0)
    equal, largest, relative, text = compare_latents(latent, flip_lowest_bit(latent, 77))
    assert equal is False and largest > 0 and relative > 0
    assert "1 of 1,024 values differ" in text


def test_the_sign_of_a_zero_counts_as_a_bit_but_not_as_a_difference():
    zero = torch.zeros(1, 4, 2, 2)
    equal, largest, relative, text = compare_latents(zero, -zero)
    assert (equal, largest, relative) == (False, 0.0, 0.0)
    assert "only the sign of a zero or the bits of a NaN differ" in text


def test_the_same_nan_is_equal_and_another_nan_is_not():
    latent = torch.randn(1, 4, 2, 2)
    latent.view(-1)[3] = math.nan
    assert compare_latents(latent, latent.clone())[:3] == (True, 0.0, 0.0)
    assert compare_latents(latent, flip_lowest_bit(latent, 3))[:3] == (False, 0.0, 0.0)


def test_a_nan_against_a_number_is_infinitely_far_and_called_broken():
    latent = torch.ones(1, 4, 2, 2)
    broken = latent.clone()
    broken.view(-1)[0] = math.nan
    equal, largest, relative, text = compare_latents(latent, broken)
    assert equal is False and largest == math.inf and relative == math.inf
    assert "at least one latent is broken" in text


def test_differences_are_measured_against_latent_a():
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    assert compare_latents(a, b)[1:3] == (0.5, pytest.approx(0.1))


def test_latents_of_different_size_are_refused_with_both_sizes_named():
    with pytest.raises(ValueError, match=r"latent A is 1 × 4 × 8 × 8 and latent B is 2 × 4 × 8 × 8"):
        compare_latents(torch.zeros(1, 4, 8, 8), torch.zeros(2, 4, 8, 8))


def test_latents_in_different_number_formats_are_never_bit_identical():
    latent = torch.ones(1, 4, 2, 2)
    equal, largest, _, text = compare_latents(latent, latent.bfloat16())
    assert equal is False and largest == 0.0 and "float32 and bfloat16" in text


def test_latents_of_several_tensors_are_compared_tensor_by_tensor():
    class Several:
        is_nested = True

        def __init__(self, *tensors):
            self.tensors = tensors

        def unbind(self):
            return self.tensors

    a, b = torch.ones(1, 4, 2, 2), torch.zeros(1, 8, 3)
    assert compare_latents(Several(a, b), Several(a, b))[0] is True
    assert compare_latents(Several(a, b), Several(a, b + 1))[:2] == (False, 1.0)


@pytest.mark.parametrize("node", [FluxQualityCompare, FluxLatentCompare], ids=lambda node: node.__name__)
def test_every_input_and_output_of_the_compare_nodes_has_a_tooltip(node):
    inputs = node.INPUT_TYPES()
    assert all(spec[1]["tooltip"] for group in ("required", "optional") for spec in inputs.get(group, {}).values())
    assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    assert node.DESCRIPTION and node.SEARCH_ALIASES and node.CATEGORY == "model_patches/flux"
