"""One model behind the API of OpenAI."""
