"""Text as tokens: documents, corpora, tokenizers, token files, windows. Nothing here knows of ranks."""
