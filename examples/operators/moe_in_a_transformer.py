"""The experts of a small random MoE model, quantised to NVFP4, saved, loaded and swapped for megamoe's kernels.

The logits are compared with the same model on dequantised weights, so that only the 4-bit activations differ. With the
package transformers the model is a random Mixtral; without it, a model of a few lines. On a CPU the kernels run in the
virtual machine.
"""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import megamoe
from megamoe.codec.nvfp4 import global_scale, quantise

VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, LAYERS = 97, 128, 128, 2, 1, 1
MIN_COSINE = 0.99
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Model = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """SwiGLU experts: gate_up_proj [experts, 2 intermediate, hidden], down_proj [experts, hidden, intermediate]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, top_k_index, top_k_weights.float())
        each = [functional.linear(swiglu(self, x, one), self.down_proj[one]) for one in range(EXPERTS)]
        return (torch.stack(each, dim=1) * share[:, :, None]).sum(dim=1).to(x.dtype)


class Block(nn.Module):
    """A router and its experts, in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights, ids = self.router(y).float().softmax(dim=-1).topk(TOPK)
        return x + self.experts(y, ids, weights / weights.sum(dim=-1, keepdim=True))


def plain_model() -> tuple[nn.Module, Model]:
    """The model, and tokens [n] to logits."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(LAYERS)))
    model = model.append(nn.Linear(HIDDEN, VOCABULARY)).bfloat16().to(DEVICE)
    return model, model


def mixtral() -> tuple[nn.Module, Model]:
    """The same for a random Mixtral of transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": TOPK, "num_hidden_layers": LAYERS}
    config = MixtralConfig(num_attention_heads=2, num_key_value_heads=2, head_dim=64, initializer_range=0.1, **sizes)
    model = MixtralForCausalLM(config).bfloat16().eval().to(DEVICE)
    return model, lambda tokens: model(tokens[None]).logits[0]


def swiglu(experts: nn.Module, x: torch.Tensor, expert: int) -> torch.Tensor:
    """The input of an expert's second GEMM."""
    gate, up = functional.linear(x, experts.gate_up_proj[expert]).chunk(2, dim=-1)
    return functional.silu(gate) * up


def checkpoint(layers: dict[str, nn.Module], seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts in NVFP4 under ModelOpt's names. `seen` has an input of each layer, to calibrate the activations."""
    tensors: dict[str, torch.Tensor] = {}
    for name, experts in layers.items():
        for expert in range(EXPERTS):
            gate_up = experts.gate_up_proj[expert].float()
            # gate and up share a global scale because they are one GEMM.
            scales = {"gate_proj": global_scale(gate_up), "up_proj": global_scale(gate_up)}
            weights = dict(zip(scales, gate_up.chunk(2), strict=True)) | {
                "down_proj": experts.down_proj[expert].float()
            }
            scales["down_proj"] = global_scale(weights["down_proj"])
            inputs = dict.fromkeys(weights, seen[name]) | {"down_proj": swiglu(experts, seen[name], expert)}
            for projection, weight in weights.items():
                codes, sf = quantise(weight.contiguous(), scales[projection])
                start = f"{name}.{expert}.{projection}"
                tensors[f"{start}.weight"], tensors[f"{start}.weight_scale"] = codes, sf.view(torch.float8_e4m3fn)
                tensors[f"{start}.weight_scale_2"] = scales[projection].clone()
                tensors[f"{start}.input_scale"] = global_scale(inputs[projection].float())
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def main() -> None:
    """Quantises, saves, loads, swaps and compares."""
    torch.manual_seed(0)
    model, logits = mixtral() if find_spec("transformers") else plain_model()
    layers = {name: one for name, one in model.named_modules() if name.endswith("experts")}
    tokens = torch.randint(VOCABULARY, (12,), device=DEVICE)
    seen: dict[str, torch.Tensor] = {}
    quantised: dict[str, megamoe.MoeWeights] = {}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for name, experts in layers.items():
            experts.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].clone()}))
        logits(tokens)
        save_file(checkpoint(layers, seen), Path(folder) / "model.safetensors")
        for name, experts in layers.items():
            weights = megamoe.load_moe_weights(folder, name.removesuffix(".experts"), device=DEVICE)
            for expert in range(EXPERTS):
                gate, up, down = weights.dequantised(expert)
                experts.gate_up_proj[expert] = torch.cat((gate, up))
                experts.down_proj[expert] = down
            quantised[name] = weights
        before = logits(tokens)
        for name, experts in layers.items():
            experts.forward = lambda x, ids, w, weights=quantised[name]: megamoe.moe(x, weights, ids, w.float())
        after = logits(tokens)
    cosine = functional.cosine_similarity(before.float().flatten(), after.float().flatten(), dim=0).item()
    assert not torch.equal(before, after), "the swap had no effect"
    assert cosine >= MIN_COSINE, f"the logits have a cosine of {cosine} with those of the dequantised weights"
    print(f"cosine of the logits with those of the dequantised weights: {cosine:.5f}")


if __name__ == "__main__":
    main()
