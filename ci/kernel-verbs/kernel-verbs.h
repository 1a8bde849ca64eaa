/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */
/*
 * Tests of the verbs for users in the kernel, through the public interface alone: what all of them
 * use.
 *
 * A test is a function in a thread of its own that ends by returning, by fail() or by skip(). Both
 * ends of its connections are on the device under test. What it makes goes with it.
 */
#ifndef KERNEL_VERBS_H
#define KERNEL_VERBS_H

#include <linux/completion.h>
#include <linux/kthread.h>
#include <linux/scatterlist.h>
#include <linux/types.h>
#include <rdma/ib_verbs.h>

struct test {
	const char *name;
	void (*run)(void);
};

/* TEST(name) { ... }, and an ENTRY(name) in the list at the end of its file. */
#define TEST(test_name) static void test_name(void)
#define ENTRY(test_name) { .name = #test_name, .run = test_name }

extern const struct test device_tests[], cq_tests[], qp_tests[], traffic_tests[], mr_tests[], key_tests[], rw_tests[];

/* Ends. Only in the thread of the test, without locks. */

__printf(3, 4) void failed_at(const char *file, int line, const char *format, ...);
__printf(1, 2) void skipped(const char *format, ...);

extern struct completion ended;

/* Ends the test. Here, so that objtool sees in every file alone that this does not return. */
static __always_inline __noreturn void end_test(void)
{
	kthread_complete_and_exit(&ended, 0);
}

#define fail(...)                                                                                                   \
	do {                                                                                                        \
		failed_at(__FILE__, __LINE__, __VA_ARGS__);                                                         \
		end_test();                                                                                         \
	} while (0)

#define skip(...)                                                                                                   \
	do {                                                                                                        \
		skipped(__VA_ARGS__);                                                                               \
		end_test();                                                                                         \
	} while (0)

/* `condition` holds. */
#define CHECK(condition)                                                                                            \
	do {                                                                                                        \
		if (!(condition))                                                                                   \
			fail("not so: %s", #condition);                                                             \
	} while (0)

/* Two integers are equal. */
#define EQ(left, right)                                                                                             \
	do {                                                                                                        \
		long long left_ = (long long)(left), right_ = (long long)(right);                                   \
		if (left_ != right_)                                                                                \
			fail("%s is %lld, not %s (%lld)", #left, left_, #right, right_);                            \
	} while (0)

/* A call succeeds, and returns zero. */
#define OK(call) EQ(call, 0)

/* What the test runs on. */
extern struct ib_device *device;

/*
 * What happens when the test ends: what may still use memory goes before that, of a kind the latest
 * first.
 */
enum when {
	UNDO_QP,
	UNDO_CQ,
	UNDO_LAST,
};

void defer(enum when when, void (*undo)(void *what), void *what);
/* Forgets the latest of these for `what`, which must have been deferred. */
void forget(void *what);
/* Zeroed memory until the test ends. */
void *memory(size_t size);

/* Reasons to skip. */
void need_cap(u64 device_cap, const char *what);
void need_fast_registration(void);
void need_sg_gaps(void);

/* Completions. */

/* What becomes of a work request. */
struct op {
	struct ib_cqe cqe;
	struct ib_cq *cq;
	struct completion done;
	struct ib_wc wc;
	/* The how-manieth completion of the test it was; zero before. */
	unsigned int order;
	/* It came in the context of a softirq. */
	bool in_softirq;
};

void op_init(struct op *op, struct ib_cq *cq);
/* Waits some time; returns whether it completed. */
bool completes(struct op *op, unsigned int milliseconds);
bool completed(struct op *op);
/* It completes so. */
void expect(struct op *op, enum ib_wc_status status);
/* It completes well, and as this operation. */
void expect_ok(struct op *op, enum ib_wc_opcode opcode);

/* Objects that go with the test. */

struct ib_pd *make_pd(unsigned int flags);
struct ib_cq *make_cq(int entries, enum ib_poll_context context);
struct ib_srq *make_srq(struct ib_pd *pd, u32 entries, u32 sges, void (*event)(struct ib_event *event, void *context),
			void *context);
struct ib_mr *make_mr(struct ib_pd *pd, enum ib_mr_type type, u32 pages);
struct ib_ah *make_ah(struct ib_pd *pd);

/* One side of a connection. */
struct end {
	struct ib_pd *pd;
	struct ib_cq *send_cq;
	struct ib_cq *recv_cq;
	struct ib_qp *qp;
};

struct options {
	/* RC, if zero. */
	enum ib_qp_type type;
	/* IB_POLL_DIRECT, if `polled` is false. */
	enum ib_poll_context context;
	bool polled;
	/* Entries of queues: 64, and of lists: 4, if zero. */
	u32 entries;
	u32 sges;
	u32 inline_bytes;
	/* Both ends in one domain. */
	bool one_pd;
	bool signal_all;
	/* Where end b receives. */
	struct ib_srq *srq;
	struct ib_pd *srq_pd;
	/* Completion queue for all. */
	struct ib_cq *cq;
	/* All, if zero. */
	int access;
	/* 7, if zero: without limit. */
	u8 rnr_retry;
	void (*event)(struct ib_event *event, void *context);
	void *context_of_event;
	u32 rdma_ctxs;
};

#define ALL_ACCESS                                                                                                  \
	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_ATOMIC)

struct pair {
	struct end a, b;
};

/* Two queue pairs that are connected to each other (UD: ready for each other). */
struct pair connected(const struct options *options);
#define PAIR(...) connected(&(struct options){ __VA_ARGS__ })

/* Its parts. */
void make_end(struct end *end, const struct options *options, bool with_srq);
/* Destroys the queue pair before the test ends. */
void destroy_qp(struct end *end);
void to_init(struct end *end, const struct options *options);
void to_rtr(struct end *end, const struct end *peer, const struct options *options);
void to_rts(struct end *end, const struct options *options);
void to_state(struct end *end, enum ib_qp_state state);
enum ib_qp_state state_of(struct end *end);
void expect_state(struct end *end, enum ib_qp_state state);
/* The address of the device's port, as it sees itself. */
void address(struct rdma_ah_attr *attr);

/* Memory. */

/* Bytes that follow each other, also for DMA. */
struct buffer {
	u8 *data;
	u64 addr;
	size_t length;
};

struct buffer *make_buffer(size_t length);
/* Bytes that depend on place and seed. */
void fill(void *data, size_t length, unsigned int seed);
bool filled(const void *data, size_t length, unsigned int seed);
bool all_zero(const void *data, size_t length);

/* Memory in segments, mapped: each at an offset in pages of its own. */
struct segment {
	u32 offset;
	u32 length;
};

struct segments {
	struct sg_table table;
	u8 **pages;
	const struct segment *segment;
	unsigned int count;
	size_t length;
	/* As mapped. */
	int nents;
};

struct segments *make_segments(const struct segment *list, unsigned int count);
/* `count` whole pages. */
struct segments *make_pages(unsigned int count);
/* Fills or checks the bytes of all segments as if they followed each other. */
void fill_segments(struct segments *segments, unsigned int seed);
bool filled_segments(struct segments *segments, unsigned int seed);
bool zero_segments(struct segments *segments);
u8 *byte_of(struct segments *segments, size_t position);

/* Work requests. */

#define MAX_SGES 32

struct request {
	union {
		struct ib_send_wr wr;
		struct ib_rdma_wr rdma;
		struct ib_atomic_wr atomic;
		struct ib_ud_wr ud;
		struct ib_reg_wr reg;
	};
	struct ib_sge sges[MAX_SGES];
	struct op op;
};

struct receive {
	struct ib_recv_wr wr;
	struct ib_sge sges[MAX_SGES];
	struct op op;
};

/* A signaled work request of the end's queue pair. */
struct request *make_request(struct end *end, enum ib_wr_opcode opcode);
void with_sge(struct request *request, u64 addr, u32 length, u32 lkey);
/* The local memory is a buffer, by the domain's local DMA key. */
void with_buffer(struct end *end, struct request *request, const struct buffer *buffer, size_t offset, u32 length);
void to_remote(struct request *request, u64 addr, u32 rkey);
int try_post(struct end *end, struct request *request);
void post(struct end *end, struct request *request);
/* Both of it, and the completion. */
void run(struct end *end, struct request *request, enum ib_wc_status status);

/* A WRITE or READ between a buffer of this end and remote memory. */
struct request *make_rdma(struct end *end, enum ib_wr_opcode opcode, const struct buffer *buffer, u32 length, u64 addr,
			  u32 rkey);

struct receive *make_receive(struct ib_cq *cq);
void receive_sge(struct receive *receive, u64 addr, u32 length, u32 lkey);
void post_receive(struct end *end, struct receive *receive);
/* A receive into a buffer, posted. */
struct receive *receive_into(struct end *end, const struct buffer *buffer, u32 length);

/* Fast registration. */

/* Maps all segments; the pages have the size of the kernel's. */
void map(struct ib_mr *mr, struct segments *segments);
/* The work request that registers what was mapped, with a new key. */
struct request *make_reg(struct end *end, struct ib_mr *mr, int access);
struct request *make_inv(struct end *end, u32 key);
/* Maps and registers, and waits until it is done. */
void registered(struct end *end, struct ib_mr *mr, struct segments *segments, int access);
/* A region for remote access to pages of its own, in the domain of end b, registered through it. */
struct ib_mr *remote_region(struct pair *pair, struct segments *segments, int access);

#endif
