"""Faces for other programs: pytest, Jupyter, Lightning, Hugging Face, Accelerate. Each is imported only when asked for."""
