"""A checkpoint audited from its config and headers: the model without its weights."""
