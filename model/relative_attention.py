"""placeholder: helper POSITIONS writes this"""

from timm.models.vision_transformer import Attention


class RelativeAttention(Attention):
    pass
