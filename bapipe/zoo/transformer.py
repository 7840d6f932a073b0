"""The building blocks of transformers (Vaswani et al. 2017, arXiv:1706.03762)."""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bapipe.zoo.checks import check_sizes


class SelfAttention(nn.Module):
    """Maps [n, length, hidden_size] to the same shape; every position attends to all, or to itself and those before.

    There is no dropout of attention weights: `scaled_dot_product_attention` takes its probability as a number, which
    tracing would fix, so it would also apply in evaluation.
    """

    def __init__(self, hidden_size: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.projection = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """`seen` [n, length] is True at the positions that may be attended to; None means all."""
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if seen is None else seen.unsqueeze(1).unsqueeze(2)
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask, is_causal=self.causal)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class PreNormBlock(nn.Module):
    """Attention and two dense layers of four times the width, on normalised inputs, each added to its input (GPT-2)."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads, causal)
        self.attention_dropout = nn.Dropout(dropout)
        self.dense_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dense_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), seen))
        x = x + self.dense_dropout(self.down(self.gelu(self.up(self.dense_norm(x)))))
        return x


class PostNormBlock(nn.Module):
    """Attention and two dense layers of four times the width, each added to its input and normalised (BERT)."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dense_dropout = nn.Dropout(dropout)
        self.dense_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, seen)))
        normed: Tensor = self.dense_norm(x + self.dense_dropout(self.down(self.gelu(self.up(x)))))
        return normed


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Raises ValueError unless the number of heads divides the hidden size."""
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} does not divide into {num_heads} heads; want a multiple of it")


def check_texts(length: int, num_positions: int, **sizes: int) -> None:
    """Raises ValueError unless sizes are integers of at least 1, heads divide the hidden size, and positions suffice.

    Args:
        sizes: with `hidden_size` and `num_heads` among them.
    """
    check_sizes(**sizes, num_positions=num_positions, length=length)
    check_heads(sizes["hidden_size"], sizes["num_heads"])
    if length > num_positions:
        raise ValueError(f"length is {length}; there are {num_positions} positions, so want at most that")
