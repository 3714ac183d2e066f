"""Makes transformers' Auto classes know KLA models.

>>> import kalman_attention.hf
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(folder)  # doctest: +SKIP
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kalman_attention.models.hf.configuration_kla import KLAConfig as KLAConfig
from kalman_attention.models.hf.modeling_kla import KLAForCausalLM as KLAForCausalLM
from kalman_attention.models.hf.modeling_kla import KLAModel as KLAModel

AutoConfig.register(KLAConfig.model_type, KLAConfig, exist_ok=True)
AutoModel.register(KLAConfig, KLAModel, exist_ok=True)
AutoModelForCausalLM.register(KLAConfig, KLAForCausalLM, exist_ok=True)
