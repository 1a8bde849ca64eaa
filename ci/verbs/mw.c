// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Memory windows of both types, in good and bad use. The second queue pair of a pair binds, the
 * first one accesses.
 */
#include "verbs-test.h"

#define BINDABLE (ALL | IBV_ACCESS_MW_BIND)
#define WINDOW_OPS                                                                                                  \
	(IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_SEND |   \
	 IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ)

static struct pair windowed(uint64_t ops)
{
	if (!(dev.orig_attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A |
						IBV_DEVICE_MEM_WINDOW_TYPE_2B)))
		skip("the device has no memory windows");
	return PAIR(.type = IBV_QPT_RC, .mr_access = LOCAL | IBV_ACCESS_MW_BIND, .ops = ops);
}

static struct ibv_mw_bind_info info(struct region *mr, size_t offset, uint64_t length, unsigned int access)
{
	return (struct ibv_mw_bind_info){ .mr = mr->mr, .addr = (uintptr_t)mr->p + offset, .length = length,
					  .mw_access_flags = access };
}

static void bind1(struct pair *p, struct ibv_mw *mw, struct ibv_mw_bind_info bind, enum ibv_wc_status status)
{
	struct ibv_mw_bind request = { .wr_id = 100, .send_flags = IBV_SEND_SIGNALED, .bind_info = bind };

	OK(ibv_bind_mw(p->qp[1], mw, &request));
	struct ibv_wc wc = expect_at(__FILE__, __LINE__, p->cq[1], 100, status, IBV_WC_BIND_MW);
	(void)wc;
}

static void bind2(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mw *mw, struct ibv_mw_bind_info bind,
		  enum ibv_wc_status status, bool ex)
{
	uint32_t rkey = ibv_inc_rkey(mw->rkey);

	POST(qp, .opcode = IBV_WR_BIND_MW, .id = 200, .mw = mw, .new_rkey = rkey, .bind = bind, .ex = ex);
	expect_at(__FILE__, __LINE__, cq, 200, status, IBV_WC_BIND_MW);
	if (status == IBV_WC_SUCCESS)
		mw->rkey = rkey;
}

static void put_ok(struct pair *p, uint32_t rkey, uint64_t addr, uint32_t length)
{
	POST(p->qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p->mr[0], .length = length, .addr = addr, .rkey = rkey);
	expect_ok(p->cq[0], 1, RDMA_WRITE);
}

static void put_refused(struct pair *p, uint32_t rkey, uint64_t addr, uint32_t length)
{
	struct conn usual = conn(0);

	POST(p->qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p->mr[0], .length = length, .addr = addr, .rkey = rkey);
	expect_error(p->cq[0], 1, REM_ACCESS_ERR);
	wait_event(QP_ACCESS_ERR);
	/* Windows of type 2 are bound through the second, so reset it only where that does not matter. */
	for (int i = 0; i < 2; i++)
		set_state(p->qp[i], IBV_QPS_RESET);
	connect_pair(p, &usual);
}

TEST(mw1_bind_and_use)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	uint64_t addr = (uintptr_t)p.mr[1].p;
	uint32_t first = mw->rkey;

	fill(p.mr[0].p, 2000, 1);
	bind1(&p, mw, info(&p.mr[1], 1000, 2000, REMOTE), IBV_WC_SUCCESS);
	CHECK(mw->rkey != first);
	put_ok(&p, mw->rkey, addr + 1000, 2000);
	CHECK(filled(p.mr[1].p + 1000, 2000, 1));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .offset = 8192, .length = 100, .addr = addr + 2900,
	     .rkey = mw->rkey);
	expect_ok(p.cq[0], 2, RDMA_READ);
	CHECK(memcmp(p.mr[0].p + 8192, p.mr[0].p + 1900, 100) == 0);
	*(uint64_t *)(p.mr[1].p + 1000) = 5;
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 3, .from = &p.mr[0], .offset = 12288, .length = 8,
	     .addr = addr + 1000, .rkey = mw->rkey, .compare_add = 6);
	expect_ok(p.cq[0], 3, FETCH_ADD);
	EQ(*(uint64_t *)(p.mr[1].p + 1000), 11);
	/* Before and behind it. */
	put_refused(&p, mw->rkey, addr + 999, 2);
	put_refused(&p, mw->rkey, addr + 2999, 2);
	/* The region itself gives no remote access. */
	put_refused(&p, p.mr[1].mr->rkey, addr + 1000, 8);
	OK(ibv_dealloc_mw(mw));
}

/* Bound anew, the earlier key and place are no longer valid; bound to nothing, none is. */
TEST(mw1_rebind_and_unbind)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	uint64_t addr = (uintptr_t)p.mr[1].p;
	uint32_t first;

	bind1(&p, mw, info(&p.mr[1], 0, 4096, REMOTE), IBV_WC_SUCCESS);
	first = mw->rkey;
	put_ok(&p, first, addr, 8);
	bind1(&p, mw, info(&p.mr[1], 4096, 4096, REMOTE), IBV_WC_SUCCESS);
	CHECK(mw->rkey != first);
	put_ok(&p, mw->rkey, addr + 4096, 8);
	put_refused(&p, first, addr, 8);
	put_refused(&p, mw->rkey, addr, 8);
	bind1(&p, mw, info(&p.mr[1], 4096, 0, 0), IBV_WC_SUCCESS);
	put_refused(&p, mw->rkey, addr + 4096, 8);
	bind1(&p, mw, info(&p.mr[1], 0, 16, REMOTE), IBV_WC_SUCCESS);
	put_ok(&p, mw->rkey, addr, 16);
}

/* It grants what it was bound with, and nothing else. */
TEST(mw1_access)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	uint64_t addr = (uintptr_t)p.mr[1].p;

	bind1(&p, mw, info(&p.mr[1], 0, 4096, IBV_ACCESS_REMOTE_READ), IBV_WC_SUCCESS);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 8, .addr = addr, .rkey = mw->rkey);
	expect_ok(p.cq[0], 1, RDMA_READ);
	put_refused(&p, mw->rkey, addr, 8);
	bind1(&p, mw, info(&p.mr[1], 0, 4096, IBV_ACCESS_REMOTE_WRITE), IBV_WC_SUCCESS);
	put_ok(&p, mw->rkey, addr, 8);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .length = 8, .addr = addr, .rkey = mw->rkey);
	expect_error(p.cq[0], 2, REM_ACCESS_ERR);
}

/* Any queue pair of its domain is served, none of another. */
TEST(mw1_of_other_domain)
{
	struct pair p = windowed(0), q = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *same = make_qp(p.pd[1], p.cq[1], &with), *peer = make_qp(p.pd[0], p.cq[0], &with);
	struct conn to = conn(same->qp_num);
	uint64_t addr = (uintptr_t)p.mr[1].p;

	connect_qp(peer, &to);
	to = conn(peer->qp_num);
	connect_qp(same, &to);
	bind1(&p, mw, info(&p.mr[1], 0, 4096, REMOTE), IBV_WC_SUCCESS);
	POST(peer, .opcode = IBV_WR_RDMA_WRITE, .id = 5, .from = &p.mr[0], .length = 8, .addr = addr, .rkey = mw->rkey);
	expect_ok(p.cq[0], 5, RDMA_WRITE);
	put_refused(&q, mw->rkey, addr, 8);
	/* Nor can one of another domain bind it. */
	struct ibv_mw_bind request = { .wr_id = 100, .send_flags = IBV_SEND_SIGNALED, .bind_info = info(&q.mr[1], 0, 4096, REMOTE) };
	int error = ibv_bind_mw(q.qp[1], mw, &request);
	if (!error)
		expect_error(q.cq[1], 100, MW_BIND_ERR);
}

/* Binds that cannot be. */
static void bad_bind(int mr_access, size_t offset, uint64_t length, unsigned int access)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	struct region mr = region(p.pd[1], 4096, mr_access);
	struct ibv_mw_bind request = { .wr_id = 100, .send_flags = IBV_SEND_SIGNALED, .bind_info = info(&mr, offset, length, access) };
	int error = RESULT(ibv_bind_mw(p.qp[1], mw, &request));

	/* Some of it libibverbs finds itself. */
	if (error) {
		EQ(error, EINVAL);
		return;
	}
	expect_error(p.cq[1], 100, MW_BIND_ERR);
	wait_state(p.qp[1], IBV_QPS_ERR);
}

TEST(mw_bind_errors)
{
	/* No right to bind. */
	bad_bind(ALL, 0, 4096, REMOTE);
	/* Out of the region. */
	bad_bind(BINDABLE, 1, 4096, REMOTE);
	bad_bind(BINDABLE, 4096, 1, REMOTE);
	/* Writing to what may not be written locally. */
	bad_bind(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND, 0, 4096, IBV_ACCESS_REMOTE_WRITE);
	bad_bind(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND, 0, 4096, IBV_ACCESS_REMOTE_ATOMIC);
}

TEST(mw_bind_mr_of_other_domain)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));

	bind2(p.qp[1], p.cq[1], mw, info(&p.mr[0], 0, 4096, REMOTE), IBV_WC_MW_BIND_ERR, false);
}

TEST(mw_holds_its_region)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	struct region mr = region(p.pd[1], 4096, BINDABLE);

	FAILS(EBUSY, ibv_dealloc_pd(p.pd[1]));
	bind1(&p, mw, info(&mr, 0, 4096, REMOTE), IBV_WC_SUCCESS);
	FAILS(EBUSY, ibv_dereg_mr(mr.mr));
	CHECK(ibv_rereg_mr(mr.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, LOCAL) != 0);
	put_ok(&p, mw->rkey, (uintptr_t)mr.p, 8);
	/* A bound window can be deallocated, and lets go. */
	uint32_t rkey = mw->rkey;
	OK(ibv_dealloc_mw(mw));
	put_refused(&p, rkey, (uintptr_t)mr.p, 8);
	OK(ibv_dereg_mr(mr.mr));
}

/* Type 2. */

static void type2(bool ex)
{
	struct pair p = windowed(ex ? WINDOW_OPS : 0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));
	uint64_t addr = (uintptr_t)p.mr[1].p;
	uint32_t first;

	fill(p.mr[0].p, 100, 1);
	for (int i = 0; i < 5; i++) {
		bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 512 * i, 512, REMOTE), IBV_WC_SUCCESS, ex);
		put_ok(&p, mw->rkey, addr + 512 * i, 100);
		CHECK(filled(p.mr[1].p + 512 * i, 100, 1));
		if (i & 1) {
			POST(p.qp[1], .opcode = IBV_WR_LOCAL_INV, .id = 300, .invalidate = mw->rkey, .ex = ex);
			expect_ok(p.cq[1], 300, LOCAL_INV);
		} else {
			/* By the peer's message. */
			RECV(p.qp[1], 10, &p.mr[1], 8192, 64);
			POST(p.qp[0], .opcode = IBV_WR_SEND_WITH_INV, .id = 2, .from = &p.mr[0], .length = 50, .invalidate = mw->rkey,
			     .ex = ex);
			expect_ok(p.cq[0], 2, SEND);
			struct ibv_wc wc = expect_ok(p.cq[1], 10, RECV);
			EQ(wc.wc_flags & IBV_WC_WITH_INV, IBV_WC_WITH_INV);
			EQ(wc.invalidated_rkey, mw->rkey);
			EQ(wc.byte_len, 50);
			CHECK(filled(p.mr[1].p + 8192, 50, 1));
		}
	}
	first = mw->rkey;
	put_refused(&p, first, addr + 2048, 8);
	OK(ibv_dealloc_mw(mw));
}

TEST(mw2_bind_use_invalidate)
{
	type2(false);
}

TEST(mw2_bind_use_invalidate_ex)
{
	type2(true);
}

/* Bound, it is not bound again before it was invalidated. */
TEST(mw2_bind_twice)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));

	bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 0, 512, REMOTE), IBV_WC_SUCCESS, false);
	bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 0, 512, REMOTE), IBV_WC_MW_BIND_ERR, false);
}

/* A window of type 2 serves the queue pair through which it was bound. */
TEST(mw2_through_other_qp)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_qp *other = make_qp(p.pd[1], p.cq[1], &with), *peer = make_qp(p.pd[0], p.cq[0], &with);
	struct conn to = conn(other->qp_num);
	uint64_t addr = (uintptr_t)p.mr[1].p;

	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B))
		skip("the device has windows of type 2A, or none");
	connect_qp(peer, &to);
	to = conn(peer->qp_num);
	connect_qp(other, &to);
	bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 0, 512, REMOTE), IBV_WC_SUCCESS, false);
	put_ok(&p, mw->rkey, addr, 8);
	POST(peer, .opcode = IBV_WR_RDMA_WRITE, .id = 5, .from = &p.mr[0], .length = 8, .addr = addr, .rkey = mw->rkey);
	expect_error(p.cq[0], 5, REM_ACCESS_ERR);
	/* The window is as it was. */
	put_ok(&p, mw->rkey, addr, 8);
}

TEST(mw2_zero_based)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));

	fill(p.mr[0].p, 100, 2);
	bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 1000, 512, REMOTE | IBV_ACCESS_ZERO_BASED), IBV_WC_SUCCESS, false);
	put_ok(&p, mw->rkey, 12, 100);
	CHECK(filled(p.mr[1].p + 1012, 100, 2));
	put_ok(&p, mw->rkey, 412, 100);
	put_refused(&p, mw->rkey, 413, 100);
}

/* What cannot be invalidated: a region's key, an unbound window, a window of type 1. */
TEST(mw_bad_invalidation)
{
	for (int i = 0; i < 3; i++) {
		struct pair p = windowed(0);
		struct ibv_mw *one = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1)), *two = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));
		uint32_t keys[3];
		struct ibv_wc wc;

		bind1(&p, one, info(&p.mr[1], 0, 512, REMOTE), IBV_WC_SUCCESS);
		keys[0] = p.mr[1].mr->rkey;
		keys[1] = two->rkey;
		keys[2] = one->rkey;
		POST(p.qp[1], .opcode = IBV_WR_LOCAL_INV, .id = 1, .invalidate = keys[i]);
		wc = wait_wc(p.cq[1]);
		/* A local operation error, or, as InfiniBand also has it, one of bind. */
		CHECK(wc.status == IBV_WC_LOC_QP_OP_ERR || wc.status == IBV_WC_MW_BIND_ERR || wc.status == IBV_WC_LOC_ACCESS_ERR);
		wait_state(p.qp[1], IBV_QPS_ERR);
	}
}

TEST(mw_bad_remote_invalidation)
{
	struct pair p = windowed(0);

	RECV(p.qp[1], 10, &p.mr[1], 0, 64);
	POST(p.qp[0], .opcode = IBV_WR_SEND_WITH_INV, .id = 1, .from = &p.mr[0], .length = 8, .invalidate = p.mr[1].mr->rkey);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
	wait_state(p.qp[1], IBV_QPS_ERR);
}

/* A window is invalidated behind a READ that uses it when the work request says FENCE. */
TEST(mw2_fenced_invalidation)
{
	const uint32_t size = 4 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .mr_access = ALL | IBV_ACCESS_MW_BIND, .size = size);

	for (int i = 0; i < 5; i++) {
		struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[0], IBV_MW_TYPE_2));

		fill(p.mr[1].p, size, i);
		bind2(p.qp[0], p.cq[0], mw, info(&p.mr[0], 0, size, REMOTE), IBV_WC_SUCCESS, false);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = size, .to = &p.mr[1]);
		POST(p.qp[0], .opcode = IBV_WR_LOCAL_INV, .id = 2, .invalidate = mw->rkey, .flags = IBV_SEND_FENCE);
		expect_ok(p.cq[0], 1, RDMA_READ);
		expect_ok(p.cq[0], 2, LOCAL_INV);
		CHECK(filled(p.mr[0].p, size, i));
		OK(ibv_dealloc_mw(mw));
	}
}

/*
 * Written through a window while it is invalidated: nothing arrives after the completion of that.
 */
LONG_TEST(mw2_invalidation_under_traffic, 120)
{
	const uint32_t size = 4 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .mr_access = LOCAL | IBV_ACCESS_MW_BIND, .size = size);
	struct conn usual = conn(0);

	for (int i = 1; i < 20; i++) {
		struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));

		memset(p.mr[0].p, i, size);
		bind2(p.qp[1], p.cq[1], mw, info(&p.mr[1], 0, size, REMOTE), IBV_WC_SUCCESS, false);
		for (int j = 0; j < 3; j++)
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = j, .from = &p.mr[0], .length = size,
			     .addr = (uintptr_t)p.mr[1].p, .rkey = mw->rkey);
		POST(p.qp[1], .opcode = IBV_WR_LOCAL_INV, .id = 300, .invalidate = mw->rkey);
		/* Or flushed, if a message that found it gone was first. */
		struct ibv_wc wc = wait_wc(p.cq[1]);
		EQ(wc.wr_id, 300);
		if (wc.status == IBV_WC_SUCCESS) {
			memset(p.mr[1].p, 0xdd, size);
			for (int j = 0; j < 3; j++) {
				wc = wait_wc(p.cq[0]);
				CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR ||
				      wc.status == IBV_WC_WR_FLUSH_ERR);
			}
			CHECK(all_bytes(p.mr[1].p, size, 0xdd));
		} else {
			EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		}
		for (int j = 0; j < 2; j++)
			set_state(p.qp[j], IBV_QPS_RESET);
		connect_pair(&p, &usual);
		OK(ibv_dealloc_mw(mw));
	}
}

TEST(mw_bad_parameters)
{
	struct pair p = windowed(0);
	struct ibv_mw *two = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));
	struct ibv_mw_bind request = { .wr_id = 100, .send_flags = IBV_SEND_SIGNALED, .bind_info = info(&p.mr[1], 0, 512, REMOTE) };

	CHECK(!ibv_alloc_mw(p.pd[1], 77));
	/* The call is for type 1. */
	FAILS(EINVAL, ibv_bind_mw(p.qp[1], two, &request));
}

/* A window's key is for others, not for local access. */
TEST(mw_is_no_lkey)
{
	struct pair p = windowed(0);
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_1));
	struct ibv_sge list;

	bind1(&p, mw, info(&p.mr[1], 0, 4096, REMOTE), IBV_WC_SUCCESS);
	list = (struct ibv_sge){ (uintptr_t)p.mr[1].p, 8, mw->rkey };
	POST(p.qp[1], .opcode = IBV_WR_SEND, .id = 1, .list = &list, .num_sge = 1);
	expect_error(p.cq[1], 1, LOC_PROT_ERR);
}

/* A window of type 2 loses its binding with the queue pair that it was bound through. */
TEST(mw2_without_its_qp)
{
	struct pair p = windowed(0);
	struct pair_with with = { .type = IBV_QPT_RC };
	struct ibv_mw *mw = MAKE(ibv_alloc_mw(p.pd[1], IBV_MW_TYPE_2));
	struct region mr = region(p.pd[1], 4096, BINDABLE);

	bind2(p.qp[1], p.cq[1], mw, info(&mr, 0, 512, REMOTE), IBV_WC_SUCCESS, false);
	FAILS(EBUSY, ibv_dereg_mr(mr.mr));
	OK(ibv_destroy_qp(p.qp[1]));
	OK(ibv_dereg_mr(mr.mr));
	struct ibv_qp *other = make_qp(p.pd[1], p.cq[1], &with);
	struct conn to = conn(p.qp[0]->qp_num);
	connect_qp(other, &to);
	set_state(p.qp[0], IBV_QPS_RESET);
	to = conn(other->qp_num);
	connect_qp(p.qp[0], &to);
	bind2(other, p.cq[1], mw, info(&p.mr[1], 0, 512, REMOTE), IBV_WC_SUCCESS, false);
	put_ok(&p, mw->rkey, (uintptr_t)p.mr[1].p, 8);
}
