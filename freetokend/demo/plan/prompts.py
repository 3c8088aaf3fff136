"""What the dense model is asked, so that its own answers can serve as chat calibration text."""

from __future__ import annotations

_TOPICS = (
    "the ocean",
    "photosynthesis",
    "a computer virus",
    "the French Revolution",
    "a healthy breakfast",
    "gravity",
    "how to learn piano",
    "a birthday party",
    "the moon",
    "recycling",
    "the history of chocolate",
    "electric cars",
    "dinosaurs",
    "a job interview",
    "friendship",
    "volcanoes",
    "saving money",
    "the internet",
    "a rainy day",
    "football",
    "how bread is made",
    "the human heart",
    "trees",
    "a good night's sleep",
)
_QUESTIONS = (
    "What is the capital of Italy?",
    "Who wrote Hamlet?",
    "Give me a Python function that adds two numbers.",
    "Translate 'good morning' to Spanish.",
    "Write a polite email asking for a day off.",
    "Give me five tips for studying.",
    "What is 12 times 3?",
    "Write a haiku about winter.",
    "Summarize: The cat sat on the mat because it was warm and the sun was shining.",
    "Name three animals that can fly.",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Who are you?",
    "Hello!",
    "Tell me a joke.",
    "Fix the grammar: He go to school yesterday.",
)


def chat_prompts() -> tuple[str, ...]:
    """All prompts, always in the same order."""
    explain = tuple(f"Explain {topic} in simple terms." for topic in _TOPICS)
    stories = tuple(f"Write a short story about {topic}." for topic in _TOPICS)
    return explain + stories + _QUESTIONS
