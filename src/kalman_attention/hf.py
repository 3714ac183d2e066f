"""Makes transformers' Auto classes know KLA models.

>>> import kalman_attention.hf
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(folder)  # doctest: +SKIP

A folder that ``save_pretrained`` wrote does the same by itself, where the package is installed:
``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kalman_attention.models.hf.classification_kla import (
    KLAForSequenceClassification as KLAForSequenceClassification,
)
from kalman_attention.models.hf.classification_kla import (
    KLAForTokenClassification as KLAForTokenClassification,
)
from kalman_attention.models.hf.configuration_kla import KLAHFConfig as KLAHFConfig
from kalman_attention.models.hf.modeling_kla import KLAForCausalLM as KLAForCausalLM
from kalman_attention.models.hf.modeling_kla import KLAModel as KLAModel

AutoConfig.register(KLAHFConfig.model_type, KLAHFConfig, exist_ok=True)
AutoModel.register(KLAHFConfig, KLAModel, exist_ok=True)
AutoModelForCausalLM.register(KLAHFConfig, KLAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    KLAHFConfig, KLAForSequenceClassification, exist_ok=True
)
AutoModelForTokenClassification.register(KLAHFConfig, KLAForTokenClassification, exist_ok=True)
