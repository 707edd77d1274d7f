"""Request and response schemas: Hugging Face and OpenAI, as pure functions and values."""
