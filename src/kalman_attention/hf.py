"""Makes transformers' Auto classes know KLA models.

>>> import kalman_attention.hf
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(folder)  # doctest: +SKIP
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kalman_attention.models.hf.configuration_kla import KLAHFConfig as KLAHFConfig
from kalman_attention.models.hf.modeling_kla import KLAForCausalLM as KLAForCausalLM
from kalman_attention.models.hf.modeling_kla import KLAModel as KLAModel

AutoConfig.register(KLAHFConfig.model_type, KLAHFConfig, exist_ok=True)
AutoModel.register(KLAHFConfig, KLAModel, exist_ok=True)
AutoModelForCausalLM.register(KLAHFConfig, KLAForCausalLM, exist_ok=True)
