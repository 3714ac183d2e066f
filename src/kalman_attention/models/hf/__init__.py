"""The HuggingFace adapter: thin classes around the native model. Needs transformers."""

from kalman_attention.models.hf.caching_kla import AttentionCacheLayer as AttentionCacheLayer
from kalman_attention.models.hf.caching_kla import StateCacheLayer as StateCacheLayer
from kalman_attention.models.hf.classification_kla import (
    KLAForSequenceClassification as KLAForSequenceClassification,
)
from kalman_attention.models.hf.classification_kla import (
    KLAForTokenClassification as KLAForTokenClassification,
)
from kalman_attention.models.hf.configuration_kla import KLAHFConfig as KLAHFConfig
from kalman_attention.models.hf.modeling_kla import KLAForCausalLM as KLAForCausalLM
from kalman_attention.models.hf.modeling_kla import KLAModel as KLAModel
