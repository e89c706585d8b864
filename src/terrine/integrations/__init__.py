"""Other libraries' training loops, made private: `huggingface`, `lightning` and `accelerate`, each by its own name.

Nothing is imported here: `from terrine.integrations.huggingface import PrivateTrainer`.
"""
