"""Text: tokens of a vocabulary, chat templates in their sandbox, the choice of the next token, stop texts.

Comes in: a header's metadata, messages, logits. Goes out: ids and text. Nothing here knows of devices.
"""
