"""What the files of an adapter are called, by PEFT and transformers."""

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
#: Files that may bring a chat template, as transformers saves them with a tokenizer; the first goes
#: before.
TEMPLATE_FILES = (TEMPLATE_NAME, TOKENIZER_CONFIG_NAME)
