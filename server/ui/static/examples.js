// Prompts to begin with: from texts that drafters know to ones they cannot.

export const EXAMPLES = [
  {
    name: "Copying: drafts well",
    prompt: "one fish, two fish, red fish, blue fish. one fish, two fish, red fish, blue fish. one fish, two fish,",
  },
  {
    name: "Code with a pattern",
    prompt:
      "def add_one(values):\n    return [value + 1 for value in values]\n\n\n" +
      "def add_two(values):\n    return [value + 2 for value in values]\n\n\ndef add_three(values):\n",
  },
  {
    name: "Records as JSON",
    prompt:
      '[{"name": "Ada", "city": "London", "year": 1815},\n {"name": "Alan", "city": "London", "year": 1912},\n' +
      ' {"name": "Grace", "city": "New York", "year": 1906},\n {"name":',
  },
  {
    name: "Free prose: drafts poorly",
    prompt: "The lighthouse keeper had not spoken to anyone for a month when",
  },
];
