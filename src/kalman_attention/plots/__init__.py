"""One file per figure; reads results, never trains. The only place that imports matplotlib."""
