"""MLA dimensions of real models, and what one rank of a tensor-parallel group sees of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MLADims:
    """Head dimensions of the attention proper. Every DeepSeek V2/V3/R1 and Kimi K2 model has the defaults."""

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128


@dataclass(frozen=True)
class ModelPreset:
    """A published model's attention configuration, from the config.json of its Hugging Face repository."""

    name: str
    source: str
    num_heads: int
    hidden_size: int
    q_lora_rank: int | None  # None: q comes from one projection
    dims: MLADims = MLADims()

    def heads_at(self, tp: int) -> int:
        """Heads of one rank at tensor parallelism `tp`. Raises ValueError when they do not divide."""
        if tp < 1 or self.num_heads % tp:
            raise ValueError(f"{self.name} has {self.num_heads} heads, which do not divide over tp={tp}")
        return self.num_heads // tp

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """The TP sizes 1 to 16 that leave at least 8 heads a rank, the fewest that any serving setup runs."""
        return tuple(tp for tp in (1, 2, 4, 8, 16) if self.num_heads % tp == 0 and self.num_heads // tp >= 8)


PRESETS = {
    preset.name: preset
    for preset in (
        ModelPreset("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 16, 2048, None),
        ModelPreset("deepseek-v2", "deepseek-ai/DeepSeek-V2", 128, 5120, 1536),
        ModelPreset("deepseek-v3", "deepseek-ai/DeepSeek-V3 (DeepSeek-R1 alike)", 128, 7168, 1536),
        ModelPreset("kimi-k2", "moonshotai/Kimi-K2-Instruct", 64, 7168, 1536),
    )
}

# Head counts that no preset gives but that kernels fold or pad differently: three quarters of 16, 16 + 4, and
# three quarters of 128 (the odd sizes of uneven tensor parallelism and pruned models).
ODD_HEADS = (12, 20, 96)
