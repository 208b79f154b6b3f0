"""Lowering: from the tensors of one module and its settings to parts, one file a PEFT type."""
