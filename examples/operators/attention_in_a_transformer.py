"""The attention of a small random transformer, swapped for megamoe's: the logits stay the same up to rounding.

With the package transformers the model is a random Llama, and the swap is a registered attention function. Without it
the model is a decoder of a few lines. On a CPU the kernels run in the virtual machine.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional

import megamoe

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 97, 128, 4, 2, 64, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Causal attention and an MLP. `attend` computes attention of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.attend: Callable[..., torch.Tensor] = lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
        k, v = self.kv(y).unflatten(2, (2 * KV_HEADS, HEAD_DIM)).transpose(1, 2).chunk(2, dim=1)
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def plain_model() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]:
    """A function from tokens to logits, and a function that swaps the attention."""
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), blocks, nn.Linear(HIDDEN, VOCABULARY)).bfloat16().to(DEVICE)

    def swap() -> None:
        for block in blocks:
            block.attend = lambda q, k, v: megamoe.attention(q, k, v, causal=True)

    return model, swap


def llama() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]:
    """The same for a random Llama of transformers."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    sizes |= {"num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 4 * HIDDEN}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().eval().to(DEVICE)

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **rest):
        if attention_mask is not None or dropout:
            raise ValueError("megamoe.attention does causal masks and windows; it has no other mask and no dropout")
        causal = rest.get("is_causal") is not False and module.is_causal
        o = megamoe.attention(query, key, value, causal=causal, window=rest.get("sliding_window"), scale=scaling)
        return o.transpose(1, 2), None

    def swap() -> None:
        AttentionInterface.register("megamoe", attend)
        model.set_attn_implementation("megamoe")

    return lambda tokens: model(tokens).logits, swap


def main() -> None:
    """Compares the logits before and after the swap."""
    torch.manual_seed(0)
    model, swap = llama() if find_spec("transformers") else plain_model()
    tokens = torch.randint(VOCABULARY, (1, 24), device=DEVICE)
    with torch.inference_mode():
        before = model(tokens)
        swap()
        after = model(tokens)
    worst = (after - before).abs().max().item()
    # bf16 has 8 bits, and each layer rounds a few times.
    assert worst < 0.05 * before.abs().max().item(), f"logits differ by {worst}"
    assert torch.equal(after.argmax(-1), before.argmax(-1)) or worst < 0.05, "another token wins"
    print(f"largest logit {before.abs().max().item():.3f}, largest difference {worst:.4f}")


if __name__ == "__main__":
    main()
