"""The watches of the API server: kopf, what works around it, and the informer that feeds the cache.

Only this room imports kopf; reconciling is `loop`'s. Of kopf it uses: discovery (a watch starts when its CRD appears,
and ends with it); one watch per kind and namespace with reconnection, bookmarks and expired versions; authentication.

Workarounds, each with its reason (figures of 5,000 jobs, 80,000 objects):

- `kopf_watches`: kopf's LIST before a watch has limit=1 and shows kopf no object. kopf starts a task with a queue for
  each object of its LIST: hundreds of MiB, and seconds without progress of the loop. `informer` lists instead.
- `informer`: lists a kind again after each LIST of kopf, and all kinds periodically. kopf emits no event for an object
  that was deleted before its LIST, and would have none for those that the LIST now hides.
- `_NoMemories`: kopf remembers each object until its deletion, 2 KB for each.
- `_NoDiffs`: kopf copies and compares each object for change handlers, which took a quarter of a burst's CPU.
- `_OBJECT_TASK_SECONDS`: kopf keeps the task of an object for 5 s after an event: thousands of tasks in a burst.
- `kopf.spawn_tasks` with `tasks.TaskTree`: `kopf.operator()` cancels at its end every later task of the loop, our
  workers included, and a watch that fails leaves the others running.
- `on_watching`: kopf installs signal handlers that end only its watches; the process installs its own again.
- Settings without kopf's finalizers, annotations, Events and log posts: it must write nothing into users' objects.
"""
