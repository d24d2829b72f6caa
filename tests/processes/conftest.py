"""Workers of Ray that share an import."""

import forked_workers

forked_workers.start_forking()
