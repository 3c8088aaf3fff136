/* Streams, events and graphs. Work runs at once, in the order of its submission; while a stream
 * captures, work becomes a node of its graph instead and runs when the graph is launched.
 *
 * A node keeps what it has to wait for: the last work of its stream, and that of the events its
 * stream was told to wait for. A launch runs the nodes in an order that these waits alone allow:
 * first submitted first, or with fakeCudaRunLastFirst whatever may run and was submitted last, or
 * with fakeCudaShuffle whatever may run. What only happens to be submitted in the right order is
 * then wrong. */
#include <stdlib.h>
#include <string.h>

#include "fake_libcuda.h"

enum { MOST_STREAMS = 64, MOST_EVENTS = 256, MOST_GRAPHS = 64, MOST_NODES = 512 };

/* Nodes of a graph, a bit each. */
typedef struct {
  uint64_t words[MOST_NODES / 64];
} NodeSet;

typedef struct {
  void (*function)(void*); /* NULL: a copy */
  void* user_data;
  CUdeviceptr to, from;
  size_t size;
  int to_host;
  NodeSet after; /* everything that has to be done before, also indirectly */
} Node;

typedef struct {
  int live, nodes_count, invalid;
  Node nodes[MOST_NODES];
} Graph;

typedef struct {
  int live;
  Graph* graph; /* being captured */
  int origin;   /* the capture began here */
  int unjoined; /* was forked, and the origin has not waited for it yet */
  NodeSet done; /* what work that is submitted now has to wait for, also indirectly */
} Stream;

typedef struct {
  int live, recorded;
  Graph* graph;   /* recorded inside this capture */
  Stream* stream; /* there */
  NodeSet done;
} Event;

static Stream streams[MOST_STREAMS];
static Event events[MOST_EVENTS];
static Graph graphs[MOST_GRAPHS];
static int last_first;
static uint64_t shuffle; /* 0: no */

EXPORT void fakeCudaRunLastFirst(int yes) { last_first = yes; }
EXPORT void fakeCudaShuffle(unsigned seed) { shuffle = seed; }

/* The next number below a bound; Knuth's generator. */
static int drawn_below(int bound) {
  shuffle = shuffle * 6364136223846793005ull + 1442695040888963407ull;
  return (int)((shuffle >> 33) % (uint64_t)bound);
}

static int contains(const NodeSet* set, int node) {
  return (int)(set->words[node / 64] >> (node % 64) & 1);
}

static void include(NodeSet* set, int node) { set->words[node / 64] |= (uint64_t)1 << (node % 64); }

static void include_all(NodeSet* set, const NodeSet* other) {
  for (int i = 0; i < MOST_NODES / 64; ++i) set->words[i] |= other->words[i];
}

static int is_part(const NodeSet* set, const NodeSet* whole) {
  for (int i = 0; i < MOST_NODES / 64; ++i) {
    if (set->words[i] & ~whole->words[i]) return 0;
  }
  return 1;
}

void reset_streams(void) {
  last_first = 0;
  shuffle = 0;
  memset(streams, 0, sizeof streams);
  memset(events, 0, sizeof events);
  memset(graphs, 0, sizeof graphs);
}

int capture_running(void) {
  for (int i = 0; i < MOST_STREAMS; ++i) {
    if (streams[i].live && streams[i].graph != NULL) return 1;
  }
  return 0;
}

void invalidate_captures(void) {
  for (int i = 0; i < MOST_STREAMS; ++i) {
    if (streams[i].graph != NULL) streams[i].graph->invalid = 1;
  }
}

static Stream* stream_of(void* handle) {
  Stream* stream = handle;
  return stream >= streams && stream < streams + MOST_STREAMS && stream->live ? stream : NULL;
}

static Event* event_of(void* handle) {
  Event* event = handle;
  return event >= events && event < events + MOST_EVENTS && event->live ? event : NULL;
}

static Graph* graph_of(void* handle) {
  Graph* graph = handle;
  return graph >= graphs && graph < graphs + MOST_GRAPHS && graph->live ? graph : NULL;
}

static Graph* new_graph(void) {
  for (int i = 0; i < MOST_GRAPHS; ++i) {
    if (graphs[i].live) continue;
    memset(&graphs[i], 0, sizeof graphs[i]);
    graphs[i].live = 1;
    return &graphs[i];
  }
  return NULL;
}

static void run(const Node* node) {
  if (node->function != NULL) {
    node->function(node->user_data);
  } else {
    memcpy((void*)node->to, (const void*)node->from, node->size);
  }
}

static CUresult submit(Stream* stream, Node node) {
  if (stream->graph == NULL) {
    run(&node);
    return CUDA_SUCCESS;
  }
  if (stream->graph->invalid) return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  if (stream->graph->nodes_count == MOST_NODES) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  const int number = stream->graph->nodes_count++;
  node.after = stream->done;
  stream->graph->nodes[number] = node;
  include(&stream->done, number);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(void** handle, unsigned flags) {
  ENTER("%u", flags);
  for (int i = 0; i < MOST_STREAMS; ++i) {
    if (streams[i].live) continue;
    streams[i] = (Stream){.live = 1};
    *handle = &streams[i];
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuStreamDestroy_v2(void* handle) {
  ENTER(".");
  Stream* stream = stream_of(handle);
  if (stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  stream->live = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(void* handle) {
  ENTER(".");
  Stream* stream = stream_of(handle);
  if (stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (stream->graph != NULL) {
    stream->graph->invalid = 1;
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void* handle) {
  ENTER("%zu", size);
  Stream* stream = stream_of(handle);
  if (stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (!accessible(to, size) || !accessible(from, size)) return refuse(CUDA_ERROR_INVALID_VALUE);
  return submit(stream, (Node){.to = to, .from = from, .size = size});
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, void* handle) {
  ENTER("%zu", size);
  Stream* stream = stream_of(handle);
  if (stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (!accessible(to, size)) return refuse(CUDA_ERROR_INVALID_VALUE);
  return submit(stream, (Node){.to = to, .from = (CUdeviceptr)from, .size = size});
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, void* handle) {
  ENTER("%zu", size);
  Stream* stream = stream_of(handle);
  if (stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (!accessible(from, size)) return refuse(CUDA_ERROR_INVALID_VALUE);
  return submit(stream, (Node){.to = (CUdeviceptr)to, .from = from, .size = size, .to_host = 1});
}

EXPORT CUresult cuLaunchHostFunc(void* handle, void (*function)(void*), void* user_data) {
  ENTER(".");
  Stream* stream = stream_of(handle);
  if (stream == NULL || function == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  return submit(stream, (Node){.function = function, .user_data = user_data});
}

EXPORT CUresult cuEventCreate(void** handle, unsigned flags) {
  ENTER("%u", flags);
  for (int i = 0; i < MOST_EVENTS; ++i) {
    if (events[i].live) continue;
    events[i] = (Event){.live = 1};
    *handle = &events[i];
    return CUDA_SUCCESS;
  }
  return refuse(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuEventDestroy_v2(void* handle) {
  ENTER(".");
  Event* event = event_of(handle);
  if (event == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  event->live = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(void* handle, void* stream_handle) {
  ENTER(".");
  Event* event = event_of(handle);
  Stream* stream = stream_of(stream_handle);
  if (event == NULL || stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  *event = (Event){
      .live = 1, .recorded = 1, .graph = stream->graph, .stream = stream, .done = stream->done};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(void* handle) {
  ENTER(".");
  const Event* event = event_of(handle);
  if (event == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  return event->graph == NULL ? CUDA_SUCCESS : refuse(CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuEventSynchronize(void* handle) {
  ENTER(".");
  const Event* event = event_of(handle);
  if (event == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (event->graph != NULL) {
    event->graph->invalid = 1;
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(void* stream_handle, void* handle, unsigned flags) {
  ENTER("%u", flags);
  Stream* stream = stream_of(stream_handle);
  const Event* event = event_of(handle);
  if (event == NULL || stream == NULL) return refuse(CUDA_ERROR_INVALID_HANDLE);
  if (!event->recorded || event->graph == NULL) return CUDA_SUCCESS;
  if (stream->graph == NULL) { /* a fork: the stream joins the capture */
    stream->graph = event->graph;
    stream->origin = 0;
    stream->unjoined = 1;
    stream->done = event->done;
  } else if (stream->graph != event->graph) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  } else {
    event->stream->unjoined = 0;
    include_all(&stream->done, &event->done);
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(void* handle, int mode) {
  ENTER("%d", mode);
  Stream* stream = stream_of(handle);
  if (stream == NULL || stream->graph != NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  stream->graph = new_graph();
  if (stream->graph == NULL) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  stream->origin = 1;
  memset(&stream->done, 0, sizeof stream->done);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(void* handle, void** graph_handle) {
  ENTER(".");
  Stream* stream = stream_of(handle);
  *graph_handle = NULL;
  if (stream == NULL || stream->graph == NULL || !stream->origin) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  }
  Graph* graph = stream->graph;
  int unjoined = 0;
  for (int i = 0; i < MOST_STREAMS; ++i) {
    if (streams[i].graph != graph) continue;
    unjoined += streams[i].unjoined || !is_part(&streams[i].done, &stream->done);
    streams[i].graph = NULL;
    streams[i].origin = streams[i].unjoined = 0;
  }
  if (graph->invalid) return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  if (unjoined > 0) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  *graph_handle = graph;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(void** executable, void* handle, uint64_t flags) {
  ENTER("%llu", (unsigned long long)flags);
  const Graph* graph = graph_of(handle);
  if (graph == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  Graph* copy = new_graph();
  if (copy == NULL) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  *copy = *graph;
  *executable = copy;
  return CUDA_SUCCESS;
}

/* One that waits for nothing which is not done. There is one: a node waits for earlier ones. */
static int next_node(const Graph* graph, const NodeSet* done) {
  int found = -1, seen = 0;
  for (int i = 0; i < graph->nodes_count; ++i) {
    if (contains(done, i) || !is_part(&graph->nodes[i].after, done)) continue;
    if (shuffle == 0 || drawn_below(++seen) == 0) found = i;
    if (!last_first && shuffle == 0) break;
  }
  return found;
}

EXPORT CUresult cuGraphLaunch(void* executable, void* stream_handle) {
  ENTER(".");
  const Graph* graph = graph_of(executable);
  const Stream* stream = stream_of(stream_handle);
  if (graph == NULL || stream == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  NodeSet done = {{0}};
  for (int count = 0; count < graph->nodes_count; ++count) {
    const int number = next_node(graph, &done);
    const Node* node = &graph->nodes[number];
    const CUdeviceptr there = node->to_host ? node->from : node->to;
    if (node->function == NULL && !accessible(there, node->size)) {
      return refuse(CUDA_ERROR_INVALID_VALUE);
    }
    run(node);
    include(&done, number);
  }
  return CUDA_SUCCESS;
}

static CUresult destroy_graph(void* handle) {
  Graph* graph = graph_of(handle);
  if (graph == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  graph->live = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(void* handle) {
  ENTER(".");
  return destroy_graph(handle);
}

EXPORT CUresult cuGraphExecDestroy(void* handle) {
  ENTER(".");
  return destroy_graph(handle);
}
