"""Small models for the extractor's tests; importing this skips where torch is absent."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
nn, functional = torch.nn, torch.nn.functional


class Attention(nn.Module):
    """Causal attention with grouped queries, without biases."""

    def __init__(
        self, hidden: int, heads: int, groups: int, *, dropout: float = 0.0, fused: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, hidden // heads
        self.dropout, self.fused = dropout, fused
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        batch, tokens, hidden = x.shape
        counts = [self.heads, self.groups, self.groups]
        qkv = self.qkv(x).view(batch, tokens, sum(counts), self.size).transpose(1, 2)
        q, k, v = qkv.split(counts, dim=1)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        if self.fused:
            options = {"is_causal": True, "dropout_p": self.dropout}
            mixed = functional.scaled_dot_product_attention(q, k, v, **options)
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))


class Layer(nn.Module):
    """A decoder layer as Llama has it, rotary positions apart."""

    def __init__(
        self, hidden: int, heads: int, groups: int, ffn: int, *, fused: bool = True
    ) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads, groups, fused=fused)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.input_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class LlamaLike(nn.Module):
    """A language model of such layers."""

    def __init__(self, *, num_layers: int, fused: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(Layer(32, 4, 2, 64, fused=fused) for _ in range(num_layers))
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 100, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
