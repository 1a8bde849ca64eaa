/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * Tests of the public verbs API: what all of them use.
 *
 * A test is a function that ends by returning, by fail() or by skip(), in a process of its own.
 * What it creates goes with its process; afterwards the kernel must have as many objects as before.
 */
#ifndef VERBS_TEST_H
#define VERBS_TEST_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* A connection to the other process of a test. */
struct link {
	int fd;
};

struct test {
	const char *name;
	void (*run)(void);
	/* Instead of `run`: two processes run it, number 0 and 1; they may be in different VMs. */
	void (*side)(struct link *link, int number);
	unsigned int seconds;
	struct test *next;
};

void register_test(struct test *test);

/* How long a test may take if it does not say so itself. */
#define SECONDS 60

#define REGISTER(test_name, time, ...)                                                                              \
	static struct test entry_##test_name = { .name = #test_name, .seconds = (time), __VA_ARGS__ };              \
	__attribute__((constructor)) static void register_##test_name(void) { register_test(&entry_##test_name); }

/* TEST(name) { ... } */
#define TEST(test_name)                                                                                             \
	static void test_##test_name(void);                                                                         \
	REGISTER(test_name, SECONDS, .run = test_##test_name)                                                       \
	static void test_##test_name(void)

/* The same with another time limit. */
#define LONG_TEST(test_name, time)                                                                                  \
	static void test_##test_name(void);                                                                         \
	REGISTER(test_name, time, .run = test_##test_name)                                                          \
	static void test_##test_name(void)

/* SIDES(name) { ... link ... number ... } */
#define SIDES(test_name)                                                                                            \
	static void test_##test_name(struct link *link, int number);                                                \
	REGISTER(test_name, 2 * SECONDS, .side = test_##test_name)                                                  \
	static void test_##test_name(struct link *link, int number)

/* Ends. */

__attribute__((noreturn, format(printf, 3, 4))) void fail_at(const char *file, int line, const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void skip(const char *format, ...);

#define fail(...) fail_at(__FILE__, __LINE__, __VA_ARGS__)

/* `condition` holds. */
#define CHECK(condition)                                                                                            \
	do {                                                                                                        \
		if (!(condition))                                                                                   \
			fail("not so: %s (errno: %s)", #condition, strerror(errno));                                \
	} while (0)

/* Two integers are equal. */
#define EQ(left, right)                                                                                             \
	do {                                                                                                        \
		long long left_ = (long long)(left), right_ = (long long)(right);                                   \
		if (left_ != right_)                                                                                \
			fail("%s is %lld (0x%llx), not %lld (0x%llx)", #left, left_, left_, right_, right_);        \
	} while (0)

/* Calls that return an errno (or -1 and errno). */
#define RESULT(call)                                                                                                \
	({                                                                                                          \
		errno = 0;                                                                                          \
		int result_ = (call);                                                                               \
		result_ == -1 ? errno : result_;                                                                    \
	})
#define OK(call)                                                                                                    \
	do {                                                                                                        \
		int error_ = RESULT(call);                                                                          \
		if (error_)                                                                                         \
			fail("%s: %s", #call, strerror(error_));                                                    \
	} while (0)
#define FAILS(error, call)                                                                                          \
	do {                                                                                                        \
		int wanted_ = (error), error_ = RESULT(call);                                                       \
		if (error_ != wanted_)                                                                              \
			fail("%s: %s, not %s", #call, error_ ? strerror(error_) : "success", strerror(wanted_));    \
	} while (0)

/* Calls that return an object (or null and errno). */
#define MAKE(call)                                                                                                  \
	({                                                                                                          \
		errno = 0;                                                                                          \
		__auto_type made_ = (call);                                                                         \
		if (!made_)                                                                                         \
			fail("%s: %s", #call, strerror(errno));                                                     \
		made_;                                                                                              \
	})
#define MAKE_FAILS(error, call)                                                                                     \
	do {                                                                                                        \
		int wanted_ = (error);                                                                              \
		errno = 0;                                                                                          \
		if (call)                                                                                           \
			fail("%s: success, not %s", #call, strerror(wanted_));                                      \
		if (errno != wanted_)                                                                               \
			fail("%s: %s, not %s", #call, strerror(errno), strerror(wanted_));                          \
	} while (0)

/* The same, and the test is skipped if the device does not have it. */
#define MAKE_IF_SUPPORTED(call)                                                                                     \
	({                                                                                                          \
		errno = 0;                                                                                          \
		__auto_type made_ = (call);                                                                         \
		if (!made_ && errno == EOPNOTSUPP)                                                                  \
			skip("not supported: %s", #call);                                                           \
		if (!made_)                                                                                         \
			fail("%s: %s", #call, strerror(errno));                                                     \
		made_;                                                                                              \
	})

/* Time. */

/* How long anything may take that has to happen, milliseconds: the machine may be busy. */
#define TIMEOUT_MS 20000
/* How long to wait for what must not happen, milliseconds. */
#define QUIET 150

uint64_t now_ns(void);
void sleep_ms(unsigned int ms);

/* The device. */

#define PORT 1

/* Opened before a test runs. */
extern struct ibv_context *ctx;
extern struct ibv_device_attr_ex dev;
extern struct ibv_port_attr port;
extern union ibv_gid gid;
extern int gid_index;

struct ibv_context *open_device(void);

/* Memory. */

#define LOCAL IBV_ACCESS_LOCAL_WRITE
#define REMOTE (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define ALL (LOCAL | REMOTE)

struct region {
	uint8_t *p;
	size_t length;
	struct ibv_mr *mr;
};

/* Zeroed pages of their own. */
void *pages(size_t length);
struct region region(struct ibv_pd *pd, size_t length, int access);
struct ibv_sge sge(const struct region *region, size_t offset, uint32_t length);
/* Bytes that depend on the seed, and the check that they are there. */
void fill(void *memory, size_t length, unsigned int seed);
bool filled(const void *memory, size_t length, unsigned int seed);
bool all_bytes(const void *memory, size_t length, uint8_t byte);

/* Queue pairs. */

struct conn {
	uint32_t qpn;
	union ibv_gid dgid;
	int access;
	enum ibv_mtu mtu;
	uint8_t rd_atomic;
	uint8_t dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
};

/* To a queue pair of this device, all access, patient. */
struct conn conn(uint32_t qpn);

#define QKEY 0x11111111u
#define PSN 0x123456u

struct ibv_ah_attr path_to(union ibv_gid dgid);
/* The path of a multicast group; the same for all who give the same number. */
union ibv_gid group_gid(unsigned int number);

int try_init(struct ibv_qp *qp, int access);
int try_rtr(struct ibv_qp *qp, const struct conn *conn);
int try_rts(struct ibv_qp *qp, const struct conn *conn);
void to_init(struct ibv_qp *qp, int access);
void to_rtr(struct ibv_qp *qp, const struct conn *conn);
void to_rts(struct ibv_qp *qp, const struct conn *conn);
void connect_qp(struct ibv_qp *qp, const struct conn *conn);
void ready_ud(struct ibv_qp *qp, uint32_t qkey);
int try_state(struct ibv_qp *qp, enum ibv_qp_state state);
void set_state(struct ibv_qp *qp, enum ibv_qp_state state);
enum ibv_qp_state state_of(struct ibv_qp *qp);
/* Waits for it. */
void wait_state(struct ibv_qp *qp, enum ibv_qp_state state);

/*
 * Two queue pairs of this process, each with a completion queue for both its queues and a region.
 */
struct pair {
	struct ibv_pd *pd[2];
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct region mr[2];
};

/* Zero stands for what is usual. */
struct pair_with {
	enum ibv_qp_type type;
	uint32_t send_wr, recv_wr, sge, inline_data;
	int cqe;
	size_t size;
	int mr_access;
	struct ibv_srq *srq;
	bool sig_all;
	/* One protection domain for both. */
	bool one_pd;
	/* Operations for ibv_wr_*. */
	uint64_t ops;
	struct ibv_comp_channel *channel;
	/* Left in the RESET state. */
	bool reset;
	/* With this instead of conn(). */
	const struct conn *conn;
};

struct pair make_pair(const struct pair_with *with);
#define PAIR(...) make_pair(&(struct pair_with){ __VA_ARGS__ })
void connect_pair(struct pair *pair, const struct conn *how);
struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq, const struct pair_with *with);

/* Posting. */

struct op {
	enum ibv_wr_opcode opcode;
	uint64_t id;
	/* Local data: a part of a region, or a list. */
	const struct region *from;
	size_t offset;
	uint32_t length;
	struct ibv_sge *list;
	int num_sge;
	unsigned int flags;
	bool unsignaled;
	/* Remote data: a part of a region, or an address and a key. */
	const struct region *to;
	uint64_t to_offset;
	uint64_t addr;
	uint32_t rkey;
	/* In the order of the network when it is sent. */
	uint32_t imm;
	uint64_t compare_add, swap;
	uint32_t invalidate;
	/* Datagrams. */
	struct ibv_ah *ah;
	uint32_t qpn, qkey;
	/* XRC. */
	uint32_t srqn;
	/* BIND_MW. */
	struct ibv_mw *mw;
	uint32_t new_rkey;
	struct ibv_mw_bind_info bind;
	/* FLUSH. */
	uint8_t flush_type, flush_level;
	/* By ibv_wr_* instead of ibv_post_send. */
	bool ex;
};

int post(struct ibv_qp *qp, const struct op *op);
#define POST(qp, ...) OK(post(qp, &(struct op){ __VA_ARGS__ }))
#define POST_FAILS(error, qp, ...) FAILS(error, post(qp, &(struct op){ __VA_ARGS__ }))

int post_recv(struct ibv_qp *qp, uint64_t id, const struct region *region, size_t offset, uint32_t length);
#define RECV(qp, id, region, offset, length) OK(post_recv(qp, id, region, offset, length))
int post_srq(struct ibv_srq *srq, uint64_t id, const struct region *region, size_t offset, uint32_t length);

/* Completions and events. */

struct ibv_cq *make_cq(int cqe);
/* Waits for one completion. */
struct ibv_wc wait_wc_at(const char *file, int line, struct ibv_cq *cq);
/* And it has this id and status. The opcode is checked with success. */
struct ibv_wc expect_at(const char *file, int line, struct ibv_cq *cq, uint64_t id, enum ibv_wc_status status,
			int opcode);
#define wait_wc(cq) wait_wc_at(__FILE__, __LINE__, cq)
#define expect(cq, id, status, opcode) expect_at(__FILE__, __LINE__, cq, id, IBV_WC_##status, opcode)
#define expect_ok(cq, id, opcode) expect_at(__FILE__, __LINE__, cq, id, IBV_WC_SUCCESS, IBV_WC_##opcode)
#define expect_error(cq, id, status) expect_at(__FILE__, __LINE__, cq, id, IBV_WC_##status, -1)
/* No completion comes. */
void expect_none_at(const char *file, int line, struct ibv_cq *cq);
#define expect_none(cq) expect_none_at(__FILE__, __LINE__, cq)

/* Waits for an asynchronous event of this type, acknowledges it, and returns it. */
struct ibv_async_event wait_event_at(const char *file, int line, struct ibv_context *context, enum ibv_event_type type);
#define wait_event(type) wait_event_at(__FILE__, __LINE__, ctx, IBV_EVENT_##type)
#define wait_event_of(context, type) wait_event_at(__FILE__, __LINE__, context, IBV_EVENT_##type)
void no_event_at(const char *file, int line, struct ibv_context *context);
#define no_event() no_event_at(__FILE__, __LINE__, ctx)
#define no_event_of(context) no_event_at(__FILE__, __LINE__, context)
/* A completion event on the channel, acknowledged; false if none comes within the time. */
bool channel_event(struct ibv_comp_channel *channel, struct ibv_cq *cq, int ms);

/* Other processes. */

/* Runs `side` in a child; returns the connection to it. The child ends with it. */
struct link *child(void (*side)(struct link *link), pid_t *pid);
/* Waits until it has ended as it should. */
void join(pid_t pid);
void put(struct link *link, const void *data, size_t length);
void get(struct link *link, void *data, size_t length);
/* Both have come here. */
void meet(struct link *link);
/* File descriptors. */
void put_fd(struct link *link, int fd);
int get_fd(struct link *link);
/* Gives up the privilege CAP_NET_RAW for good. */
void drop_net_raw(void);

/* What `rdma resource show` says. */
unsigned int resource(const char *kind);

#endif
