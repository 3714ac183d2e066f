"""Classification heads: of whole sequences by their last token, or of every token."""

from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from kalman_attention.models.hf.pretrained_kla import KLAPreTrainedModel


class KLAForSequenceClassification(GenericForSequenceClassification, KLAPreTrainedModel):
    """``KLAModel`` with a linear head on each row's last token that is not padding.

    Batches need ``config.pad_token_id``; ``config.num_labels`` is the number of classes. Losses are
    those of transformers.
    """


class KLAForTokenClassification(GenericForTokenClassification, KLAPreTrainedModel):
    """``KLAModel`` with a linear head on every token, ``config.num_labels`` wide."""
