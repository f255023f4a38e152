"""`kedge studio`: new runs from templates, forms from the recipe's schema, runs started and watched, chats.

`project` keeps everything inside of one folder, `fields` and `drafts` make the form and its YAML, `jobs` are the child
processes, `services` are what commands lend; the rest are pages.
"""
