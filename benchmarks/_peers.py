"""Packages that do a part of what `infer` does, if they are installed: ``pip install --no-deps gradcache==0.0.1``, and
``pip install sentence-transformers``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def grad_cache() -> Any:
    """The class `GradCache` of gradcache 0.0.1, or None."""
    try:
        import gradcache
    except ImportError:
        print("  gradcache is not installed and is left out", file=sys.stderr)
        return None
    sys.modules.setdefault("grad_cache", gradcache)  # its files import one another by this name, which it does not install
    from gradcache.grad_cache import GradCache

    return GradCache


def cached_loss(encoder: nn.Module, chunk: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """`CachedMultipleNegativesRankingLoss` of sentence-transformers around an encoder of vectors, or None."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from sentence_transformers import SentenceTransformer
            from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    except ImportError:
        print("  sentence-transformers is not installed and is left out", file=sys.stderr)
        return None

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return features | {"sentence_embedding": self.encoder(features["inputs_embeds"])}

    loss = CachedMultipleNegativesRankingLoss(SentenceTransformer(modules=[Embed()], device="cpu"), mini_batch_size=chunk)
    return lambda a, b: loss([{"inputs_embeds": a}, {"inputs_embeds": b}], None)
