"""One web application: people's labels, live chats, and the pages of `kedge watch` and `kedge board` beside them.

Who may see what is in `roles`, how a visitor is known in `guard`; pages are made on the server, one script moves them.
"""
