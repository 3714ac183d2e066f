"""Heads that classify: whole sequences by their last token, or every token."""

from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from kalman_attention.models.hf.pretrained_kla import KLAPreTrainedModel


class KLAForSequenceClassification(GenericForSequenceClassification, KLAPreTrainedModel):
    """``KLAModel`` and a linear score of each row's last token that is no padding.

    Batches need ``config.pad_token_id``; ``config.num_labels`` is the number of classes. Losses are
    those of transformers.
    """


class KLAForTokenClassification(GenericForTokenClassification, KLAPreTrainedModel):
    """``KLAModel`` and a linear score of every token, ``config.num_labels`` wide."""
