"""The watches of the API server: kopf, what works around it, and the informer that feeds the cache.

Only this room imports kopf; reconciling is `loop`'s. Of kopf it uses discovery (a watch starts when its CRD appears,
and ends with it), one watch per kind and namespace with reconnection, bookmarks and expired versions, and
authentication.

Workarounds, each with its reason:

- No object reaches kopf (`informer`). Its LIST before a watch gets limit=1 and no object, and its watches get
  bookmarks in place of events, which `informer` takes from the stream. kopf starts a task with a queue for each object,
  remembers each until its deletion, and copies and compares it for change handlers. With `kopf.on.event` handlers in
  place of this, 1,000 jobs on two cores took 242 s of CPU time until all ran, and a restart among them 1,034 MiB, 174 s
  of CPU time, and 228 s until all were reconciled (`make bench-operator JOBS=1000`; docs/install.md has the figures of
  what is here).
- `informer` lists a kind after each LIST of kopf, and all kinds periodically: an object that was deleted before a LIST
  has no event (nolar/kopf issue 698).
- `kopf.spawn_tasks` with `tasks.TaskTree`: `kopf.operator()` cancels at its end every later task of the loop, our
  workers included (issue 1030), and a watch that fails leaves the others running.
- `on_watching`: kopf installs signal handlers that end only its watches; the process installs its own again.
- Settings without kopf's finalizers, Events and log posts: it must write nothing into users' objects.
"""
