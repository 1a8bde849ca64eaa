// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Processes and resources: fork, death in the middle of it all, limits, parent and thread domains,
 * GIDs that change.
 */
#include "verbs-test.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* A process that forked goes on, whatever its child does to the memory it inherited. */
TEST(fork_while_in_use)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 65536);

	OK(ibv_fork_init());
	CHECK(ibv_is_fork_initialized() != IBV_FORK_DISABLED);
	for (int round = 0; round < 5; round++) {
		pid_t pid;

		RECV(p.qp[1], 10, &p.mr[1], 0, 65536);
		fill(p.mr[0].p, 65536, round);
		pid = fork();
		CHECK(pid >= 0);
		if (pid == 0) {
			/* What is not kept from children is written to. */
			memset(ctx->device->name, 0, 1);
			_exit(0);
		}
		memset(p.mr[0].p + 100, 0x11, 100);
		POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 65536);
		expect_ok(p.cq[0], 1, SEND);
		expect_ok(p.cq[1], 10, RECV);
		CHECK(memcmp(p.mr[0].p, p.mr[1].p, 65536) == 0);
		join(pid);
	}
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 65536, .to = &p.mr[1]);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
}

/* A child opens the device for itself. */
static void own_device(struct link *link)
{
	struct pair p;

	ctx = open_device();
	p = PAIR(.type = IBV_QPT_RC);
	fill(p.mr[0].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 100, 1));
	meet(link);
}

TEST(fork_child_with_own_device)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	pid_t pids[4];
	struct link *links[4];

	for (int i = 0; i < 4; i++)
		links[i] = child(own_device, &pids[i]);
	for (int i = 0; i < 4; i++) {
		meet(links[i]);
		join(pids[i]);
	}
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
}

/* A process with one of everything, traffic in both directions, and no time to clean up. */
struct peer {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static void doomed(struct link *link)
{
	struct peer mine, theirs;
	struct ibv_comp_channel *channel;
	union ibv_gid group = group_gid(20);
	uint64_t sent = 0;

	ctx = open_device();
	channel = MAKE(ibv_create_comp_channel(ctx));
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 1 << 20, .mr_access = ALL | IBV_ACCESS_MW_BIND, .channel = channel,
			     .reset = true);
	struct pair ud = PAIR(.type = IBV_QPT_UD), uc = PAIR(.type = IBV_QPT_UC);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_mw *mw = ibv_alloc_mw(p.pd[0], IBV_MW_TYPE_2);
	struct ibv_alloc_dm_attr dm_attr = { .length = 4096 };
	struct ibv_dm *dm = dev.max_dm_size ? ibv_alloc_dm(ctx, &dm_attr) : NULL;
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					   .oflags = O_CREAT };

	MAKE(ibv_create_srq(p.pd[0], &srq));
	OK(ibv_attach_mcast(ud.qp[0], &group, 0));
	if (dm)
		MAKE(ibv_reg_dm_mr(p.pd[0], dm, 0, 4096, ALL | IBV_ACCESS_ZERO_BASED));
	if (dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC) {
		struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };

		attr.xrcd = MAKE(ibv_open_xrcd(ctx, &xrcd));
		MAKE(ibv_create_qp_ex(ctx, &attr));
	}
	for (int i = 0; i < 8; i++) {
		RECV(ud.qp[1], i, &ud.mr[1], 0, 1024);
		RECV(uc.qp[1], i, &uc.mr[1], 0, 1024);
	}
	mine = (struct peer){ p.qp[0]->qp_num, p.mr[0].mr->rkey, (uintptr_t)p.mr[0].p };
	put(link, &mine, sizeof(mine));
	get(link, &theirs, sizeof(theirs));
	struct conn to = conn(theirs.qpn);
	connect_qp(p.qp[0], &to);
	meet(link);
	if (mw) {
		POST(p.qp[0], .opcode = IBV_WR_BIND_MW, .id = 1, .mw = mw, .new_rkey = ibv_inc_rkey(mw->rkey),
		     .bind = { p.mr[0].mr, mine.addr, 4096, REMOTE });
		expect_ok(p.cq[0], 1, BIND_MW);
	}
	for (;;) {
		struct ibv_wc wc;

		/* Never more than fit. */
		if (post(p.qp[0], &(struct op){ .opcode = sent & 1 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, .id = sent, .from = &p.mr[0],
						.length = 1 << 20, .addr = theirs.addr, .rkey = theirs.rkey }) == 0)
			sent++;
		while (ibv_poll_cq(p.cq[0], 1, &wc) == 1)
			;
	}
}

LONG_TEST(death_in_mid_traffic, 120)
{
	struct conn to = conn(0);

	to.timeout = 14;
	to.retry_cnt = 2;
	for (int round = 0; round < 6; round++) {
		struct pair_with with = { .type = IBV_QPT_RC };
		struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
		struct ibv_cq *cq = make_cq(64);
		struct ibv_qp *qp = make_qp(pd, cq, &with);
		struct region mr = region(pd, 1 << 20, ALL);
		struct peer mine = { qp->qp_num, mr.mr->rkey, (uintptr_t)mr.p }, theirs;
		unsigned int before = resource("qp"), ok = 0;
		struct ibv_wc wc;
		pid_t pid;
		struct link *link = child(doomed, &pid);
		int status;

		get(link, &theirs, sizeof(theirs));
		to.qpn = theirs.qpn;
		connect_qp(qp, &to);
		put(link, &mine, sizeof(mine));
		meet(link);
		sleep_ms(20 * round);
		for (uint64_t i = 0; i < 8; i++)
			POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &mr, .length = 1 << 20, .addr = theirs.addr,
			     .rkey = theirs.rkey);
		CHECK(kill(pid, SIGKILL) == 0);
		CHECK(waitpid(pid, &status, 0) == pid);
		if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
			fail("the child ended before its time");
		/* What it had goes away, and with it the answers. */
		for (int i = 0; i < 8; i++) {
			wc = wait_wc(cq);
			EQ(wc.wr_id, i);
			if (wc.status == IBV_WC_SUCCESS)
				EQ(ok++, i);
			else
				CHECK(wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_WR_FLUSH_ERR ||
				      wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_OP_ERR);
		}
		uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;
		while (resource("qp") > before && now_ns() < deadline)
			sleep_ms(50);
		EQ(resource("qp"), before);
		/* The memory is left alone now. */
		fill(mr.p, 1 << 20, round);
		sleep_ms(20);
		CHECK(filled(mr.p, 1 << 20, round));
		OK(ibv_destroy_qp(qp));
		OK(ibv_destroy_cq(cq));
		OK(ibv_dereg_mr(mr.mr));
		OK(ibv_dealloc_pd(pd));
		while (resource("qp") > before)
			sleep_ms(10);
		/* Events that were about the dead are not ours; drop those of our queue pair. */
		close(link->fd);
		free(link);
	}
}

/*
 * Memory that goes away under a region: unmapped by its owner it stays pinned, and is nobody
 * else's.
 */
TEST(unmapped_region_stays_pinned)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct region gone = region(p.pd[1], 65536, ALL);

	fill(gone.p, 65536, 3);
	CHECK(munmap(gone.p, 65536) == 0);
	/* New memory, perhaps at the same address, is not the region's. */
	uint8_t *fresh = pages(65536);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 4096, .to = &gone);
	expect_ok(p.cq[0], 1, RDMA_READ);
	CHECK(filled(p.mr[0].p, 4096, 3));
	memset(p.mr[0].p, 0xff, 4096);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 4096, .to = &gone);
	expect_ok(p.cq[0], 2, RDMA_WRITE);
	CHECK(all_bytes(fresh, 65536, 0));
	OK(ibv_dereg_mr(gone.mr));
}

/* Limits: as many as there may be, or a good part of it, and all of them again afterwards. */

struct maker {
	const char *what;
	/* Null and errno, or an object. */
	void *(*make)(int i);
	int (*destroy)(void *object);
	int limit;
};

static struct ibv_pd *the_pd;
static struct ibv_cq *the_cq;
static struct region the_mr;

static void *a_pd(int i)
{
	(void)i;
	return ibv_alloc_pd(ctx);
}

static int no_pd(void *object)
{
	return ibv_dealloc_pd(object);
}

static void *a_cq(int i)
{
	return ibv_create_cq(ctx, 1, NULL, NULL, i % ctx->num_comp_vectors);
}

static int no_cq(void *object)
{
	return ibv_destroy_cq(object);
}

static void *a_qp(int i)
{
	struct ibv_qp_init_attr attr = { .send_cq = the_cq, .recv_cq = the_cq, .qp_type = i & 1 ? IBV_QPT_RC : IBV_QPT_UD,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };

	return ibv_create_qp(the_pd, &attr);
}

static int no_qp(void *object)
{
	return ibv_destroy_qp(object);
}

static void *an_mr(int i)
{
	(void)i;
	return ibv_reg_mr(the_pd, the_mr.p, 4096, ALL);
}

static int no_mr(void *object)
{
	return ibv_dereg_mr(object);
}

static void *an_mw(int i)
{
	return ibv_alloc_mw(the_pd, i & 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
}

static int no_mw(void *object)
{
	return ibv_dealloc_mw(object);
}

static void *an_srq(int i)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 1, .max_sge = 1 } };

	(void)i;
	return ibv_create_srq(the_pd, &attr);
}

static int no_srq(void *object)
{
	return ibv_destroy_srq(object);
}

static void *an_ah(int i)
{
	struct ibv_ah_attr attr = path_to(gid);

	(void)i;
	return ibv_create_ah(the_pd, &attr);
}

static int no_ah(void *object)
{
	return ibv_destroy_ah(object);
}

static void *an_xrcd(int i)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					   .oflags = O_CREAT };

	(void)i;
	return ibv_open_xrcd(ctx, &attr);
}

static int no_xrcd(void *object)
{
	return ibv_close_xrcd(object);
}

static void exhaust(struct maker maker)
{
	/* Not all of it where that would take all day. */
	enum { ENOUGH = 1500 };
	static void *objects[ENOUGH];
	int made[2];

	the_pd = MAKE(ibv_alloc_pd(ctx));
	the_cq = make_cq(16);
	the_mr = region(the_pd, 4096, ALL);
	if (maker.limit == 0)
		skip("the device has none");
	for (int round = 0; round < 2; round++) {
		int n = 0;

		while (n < ENOUGH) {
			errno = 0;
			objects[n] = maker.make(n);
			if (!objects[n]) {
				if (errno != ENOMEM)
					fail("%s number %d: %s, not ENOMEM", maker.what, n, strerror(errno));
				break;
			}
			n++;
		}
		if (n > maker.limit)
			fail("%d times %s, and the limit is %d", n, maker.what, maker.limit);
		/* The kernel has its share of what there may be. */
		if (n < ENOUGH && n < maker.limit - 16)
			fail("%d times %s only, and the limit is %d", n, maker.what, maker.limit);
		made[round] = n;
		/* Not in the order of their creation. */
		for (int step = 0; step < 3; step++)
			for (int i = step; i < n; i += 3)
				if (maker.destroy(objects[i]))
					fail("%s cannot be destroyed: %s", maker.what, strerror(errno));
	}
	EQ(made[1], made[0]);
}

LONG_TEST(limit_pd, 120)
{
	exhaust((struct maker){ "PD", a_pd, no_pd, dev.orig_attr.max_pd });
}

LONG_TEST(limit_cq, 120)
{
	exhaust((struct maker){ "CQ", a_cq, no_cq, dev.orig_attr.max_cq });
}

LONG_TEST(limit_qp, 120)
{
	exhaust((struct maker){ "QP", a_qp, no_qp, dev.orig_attr.max_qp });
}

LONG_TEST(limit_mr, 120)
{
	exhaust((struct maker){ "MR", an_mr, no_mr, dev.orig_attr.max_mr });
}

LONG_TEST(limit_mw, 120)
{
	exhaust((struct maker){ "MW", an_mw, no_mw, dev.orig_attr.max_mw });
}

LONG_TEST(limit_srq, 120)
{
	exhaust((struct maker){ "SRQ", an_srq, no_srq, dev.orig_attr.max_srq });
}

LONG_TEST(limit_ah, 120)
{
	exhaust((struct maker){ "AH", an_ah, no_ah, dev.orig_attr.max_ah });
}

LONG_TEST(limit_xrcd, 120)
{
	int limit = dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC ? 1 << 30 : 0;

	exhaust((struct maker){ "XRC domain", an_xrcd, no_xrcd, limit });
}

/* The largest queues. */
TEST(limit_qp_size)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC };
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_qp *qp;

	attr.send_cq = attr.recv_cq = make_cq(16);
	attr.cap = (struct ibv_qp_cap){ .max_send_wr = dev.orig_attr.max_qp_wr, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 };
	qp = MAKE(ibv_create_qp(pd, &attr));
	OK(ibv_destroy_qp(qp));
	attr.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_recv_wr = dev.orig_attr.max_qp_wr, .max_send_sge = dev.orig_attr.max_sge,
					.max_recv_sge = dev.orig_attr.max_sge };
	qp = MAKE(ibv_create_qp(pd, &attr));
	OK(ibv_destroy_qp(qp));
	attr.cap = (struct ibv_qp_cap){ .max_send_wr = dev.orig_attr.max_qp_wr + 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 };
	MAKE_FAILS(EINVAL, ibv_create_qp(pd, &attr));
	attr.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = dev.orig_attr.max_sge + 1, .max_recv_sge = 1 };
	MAKE_FAILS(EINVAL, ibv_create_qp(pd, &attr));
	attr.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 };
	attr.qp_type = 77;
	CHECK(!ibv_create_qp(pd, &attr));
	attr.qp_type = IBV_QPT_RAW_PACKET;
	MAKE_FAILS(EOPNOTSUPP, ibv_create_qp(pd, &attr));
}

TEST(limit_mcast_attach)
{
	struct pair p = PAIR(.type = IBV_QPT_UD);
	int groups = dev.orig_attr.max_mcast_grp, attached = 0, error = 0;

	CHECK(groups > 0 && dev.orig_attr.max_mcast_qp_attach > 0 && dev.orig_attr.max_total_mcast_qp_attach > 0);
	for (; attached < groups + 1 && attached < 200; attached++) {
		union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 78, attached >> 8, attached } };

		error = RESULT(ibv_attach_mcast(p.qp[0], &group, 0));
		if (error)
			break;
	}
	if (error) {
		EQ(error, ENOMEM);
		EQ(attached, groups);
	}
	while (attached--) {
		union ibv_gid group = { .raw = { [10] = 0xff, 0xff, 239, 78, attached >> 8, attached } };

		OK(ibv_detach_mcast(p.qp[0], &group, 0));
	}
}

/* Parent and thread domains. */

struct counting {
	int allocs, frees;
	bool refuse;
	void *context;
};

static void *counted_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t resource_type)
{
	struct counting *counting = pd_context;
	void *memory = NULL;

	(void)pd;
	(void)resource_type;
	if (counting->refuse) {
		errno = ENOMEM;
		return NULL;
	}
	counting->allocs++;
	CHECK(posix_memalign(&memory, alignment, size) == 0);
	memset(memory, 0xa5, size);
	return memory;
}

static void counted_free(struct ibv_pd *pd, void *pd_context, void *memory, uint64_t resource_type)
{
	struct counting *counting = pd_context;

	(void)pd;
	(void)resource_type;
	counting->frees++;
	free(memory);
}

TEST(parent_domain)
{
	struct ibv_td_init_attr td_attr = { .comp_mask = 0 };
	struct counting counting = { .allocs = 0 };
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx)), *parent;
	struct ibv_td *td = MAKE_IF_SUPPORTED(ibv_alloc_td(ctx, &td_attr));
	struct ibv_parent_domain_init_attr attr = {
		.pd = pd,
		.td = td,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
		.alloc = counted_alloc,
		.free = counted_free,
		.pd_context = &counting,
	};
	struct pair_with with = { .type = IBV_QPT_RC };

	parent = MAKE_IF_SUPPORTED(ibv_alloc_parent_domain(ctx, &attr));
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 32, .wc_flags = IBV_WC_STANDARD_FLAGS,
					       .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent };
	struct ibv_cq *cq = ibv_cq_ex_to_cq(MAKE(ibv_create_cq_ex(ctx, &cq_attr)));
	struct ibv_qp *qp = make_qp(parent, cq, &with);
	struct region mr = region(parent, 4096, ALL);
	struct conn to = conn(qp->qp_num);

	/* Our memory is what the queues are in. */
	CHECK(counting.allocs > 0);
	FAILS(EBUSY, ibv_dealloc_pd(pd));
	FAILS(EBUSY, ibv_dealloc_td(td));
	connect_qp(qp, &to);
	fill(mr.p, 100, 1);
	for (uint64_t i = 0; i < 100; i++) {
		POST(qp, .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &mr, .length = 100, .to = &mr, .to_offset = 1024);
		expect_ok(cq, i, RDMA_WRITE);
	}
	CHECK(filled(mr.p + 1024, 100, 1));
	/* When it has none. */
	counting.refuse = true;
	struct ibv_qp_init_attr_ex qp_attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD,
					       .pd = parent, .cap = { .max_send_wr = 1, .max_recv_wr = 1 } };
	MAKE_FAILS(ENOMEM, ibv_create_qp_ex(ctx, &qp_attr));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
	EQ(counting.frees, counting.allocs);
	OK(ibv_dereg_mr(mr.mr));
	OK(ibv_dealloc_pd(parent));
	OK(ibv_dealloc_td(td));
	OK(ibv_dealloc_pd(pd));
}

/* Addresses of the interface come and go, and with them GIDs. */

static bool has_gid(const union ibv_gid *wanted)
{
	struct ibv_gid_entry entry;

	for (int i = 0; i < port.gid_tbl_len; i++)
		if (ibv_query_gid_ex(ctx, PORT, i, &entry, 0) == 0 && memcmp(&entry.gid, wanted, 16) == 0)
			return true;
	return false;
}

static void wait_gid(const union ibv_gid *wanted, bool there)
{
	uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;

	while (has_gid(wanted) != there) {
		if (now_ns() > deadline)
			fail("the GID is %s", there ? "not there" : "still there");
		sleep_ms(20);
	}
}

static void wait_gid_event(void)
{
	struct ibv_async_event event;

	do {
		struct pollfd poll_fd = { .fd = ctx->async_fd, .events = POLLIN };

		CHECK(poll(&poll_fd, 1, TIMEOUT_MS) > 0);
		OK(ibv_get_async_event(ctx, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_GID_CHANGE);
}

TEST(gid_change)
{
	union ibv_gid extra = { .raw = { [10] = 0xff, 0xff, 10, 76, getpid() >> 8, 1 } };
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct conn how = conn(0);
	char add[128], del[128];

	snprintf(add, sizeof(add), "ip addr add 10.76.%d.1/32 dev eth0", extra.raw[14]);
	snprintf(del, sizeof(del), "ip addr del 10.76.%d.1/32 dev eth0", extra.raw[14]);
	CHECK(!has_gid(&extra));
	EQ(system(add), 0);
	wait_gid_event();
	wait_gid(&extra, true);
	how.dgid = extra;
	how.timeout = 14;
	how.retry_cnt = 1;
	connect_pair(&p, &how);
	fill(p.mr[0].p, 100, 1);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 100, .to = &p.mr[1]);
	struct ibv_wc wc = wait_wc(p.cq[0]);
	EQ(system(del), 0);
	EQ(wc.status, IBV_WC_SUCCESS);
	wait_gid(&extra, false);
	/* Nobody has the address any more. */
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = 100, .to = &p.mr[1], .to_offset = 1024);
	expect_error(p.cq[0], 2, RETRY_EXC_ERR);
	CHECK(all_bytes(p.mr[1].p + 1024, 100, 0));
	/* An index without a GID is refused. */
	struct ibv_qp *qp = p.qp[1];
	struct conn to = conn(p.qp[0]->qp_num);
	set_state(qp, IBV_QPS_RESET);
	to_init(qp, REMOTE);
	gid_index = port.gid_tbl_len - 1;
	CHECK(try_rtr(qp, &to) != 0);
}

/* Device attributes make sense. */
TEST(device_attributes)
{
	struct ibv_device_attr *a = &dev.orig_attr;
	struct ibv_port_attr none;

	CHECK(a->node_guid && a->sys_image_guid && a->vendor_id);
	CHECK(a->max_qp > 0 && a->max_qp_wr > 0 && a->max_sge > 0 && a->max_cq > 0 && a->max_cqe > 0 && a->max_mr > 0 && a->max_pd > 0);
	CHECK(a->max_mr_size >= 1ull << 32);
	CHECK(a->page_size_cap & 4096);
	CHECK(a->max_qp_rd_atom > 0 && a->max_qp_init_rd_atom > 0 && a->max_res_rd_atom >= a->max_qp_rd_atom);
	EQ(a->phys_port_cnt, 1);
	EQ(port.state, IBV_PORT_ACTIVE);
	EQ(port.link_layer, IBV_LINK_LAYER_ETHERNET);
	CHECK(port.max_mtu >= port.active_mtu && port.active_mtu >= IBV_MTU_1024);
	CHECK(port.max_msg_sz >= 1 << 30);
	CHECK(port.gid_tbl_len > 0 && port.pkey_tbl_len > 0);
	FAILS(EINVAL, ibv_query_port(ctx, 0, &none));
	FAILS(EINVAL, ibv_query_port(ctx, 2, &none));
	__be16 pkey;
	OK(ibv_query_pkey(ctx, PORT, 0, &pkey));
	EQ(pkey, 0xffff);
	EQ(ibv_get_pkey_index(ctx, PORT, 0xffff), 0);
	CHECK(ibv_query_pkey(ctx, PORT, port.pkey_tbl_len, &pkey) != 0);
	union ibv_gid beyond;
	CHECK(ibv_query_gid(ctx, PORT, port.gid_tbl_len, &beyond) != 0);
}

/* The order of data that MPI and others rely on. */
TEST(data_in_order)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 1 << 20);
	volatile uint8_t *last = p.mr[1].p + (1 << 20) - 1;

	if (!ibv_query_qp_data_in_order(p.qp[0], IBV_WR_RDMA_WRITE, 0))
		skip("the device does not promise it");
	for (int i = 1; i < 30; i++) {
		uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;

		memset(p.mr[0].p, i, 1 << 20);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 1 << 20, .to = &p.mr[1]);
		while (*last != i)
			CHECK(now_ns() < deadline);
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		CHECK(all_bytes(p.mr[1].p, 1 << 20, i));
		expect_ok(p.cq[0], i, RDMA_WRITE);
	}
}

/* What the device does not have is refused with the one error that says so. */
TEST(unsupported_is_said)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = p.pd[0], .cq = p.cq[0] };
	struct ibv_rwq_ind_table_init_attr table = { .log_ind_tbl_size = 0, .ind_tbl = NULL };
	struct ibv_counters_init_attr counters = { .comp_mask = 0 };
	struct ibv_flow_attr flow = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(flow), .port = PORT };
	struct ibv_sge range = sge(&p.mr[0], 0, 4096);
	struct ibv_ece ece = { .vendor_id = 0 };

	MAKE_FAILS(EOPNOTSUPP, ibv_create_wq(ctx, &wq));
	MAKE_FAILS(EOPNOTSUPP, ibv_create_rwq_ind_table(ctx, &table));
	MAKE_FAILS(EOPNOTSUPP, ibv_create_counters(ctx, &counters));
	MAKE_FAILS(EOPNOTSUPP, ibv_create_flow(p.qp[0], &flow));
	FAILS(EOPNOTSUPP, ibv_advise_mr(p.pd[0], IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &range, 1));
	FAILS(EOPNOTSUPP, ibv_query_ece(p.qp[0], &ece));
	EQ(dev.odp_caps.general_caps, 0);
	EQ(dev.tm_caps.max_num_tags, 0);
	EQ(dev.rss_caps.supported_qpts, 0);
	EQ(dev.raw_packet_caps, 0);
}
