"""Handwritten digits that ship with scikit-learn: 1,797 images of 8 x 8 grey pixels, enlarged."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

CLASSES = 10
TEST_SHARE = 0.2


def split(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the images for training and for the test: each image is in one of them, which depends on `seed`."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    boundary = round(count * (1 - TEST_SHARE))
    return order[:boundary], order[boundary:]


def load(size: int = 32, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Images (1, size, size) with their digits, for training and for the test.

    Pixels have mean 0 and standard deviation 1 over the training images.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise SystemExit("the images need a package: pip install scikit-learn") from error
    pixels, digits = load_digits(return_X_y=True)
    small = torch.from_numpy(pixels).float().view(-1, 1, 8, 8)
    images = functional.interpolate(small, size=(size, size), mode="bilinear")
    labels = torch.from_numpy(digits).long()
    train, test = split(len(labels), seed)
    images = (images - images[train].mean()) / images[train].std()
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
