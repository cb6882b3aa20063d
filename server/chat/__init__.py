"""Chats: messages, the model's template, and answers in the shape of a chat."""
