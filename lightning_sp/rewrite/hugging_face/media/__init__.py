"""Images, videos and sounds among a Hugging Face model's text: where their tokens are placed, and which of them see each other."""
