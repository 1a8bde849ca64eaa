// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Atomic operations against the guest's processors, masked ones, ATOMIC_WRITE and FLUSH. */
#include "verbs-test.h"

#include <infiniband/virtio_rdma_dv.h>
#include <pthread.h>

/* A thread of the guest adds while the device does: no increment is lost. */

struct adding {
	uint64_t *word;
	uint64_t added;
	bool stop;
};

static void *adder(void *argument)
{
	struct adding *adding = argument;

	while (!__atomic_load_n(&adding->stop, __ATOMIC_RELAXED)) {
		for (int i = 0; i < 1000; i++)
			__atomic_fetch_add(adding->word, 1, __ATOMIC_SEQ_CST);
		adding->added += 1000;
	}
	return NULL;
}

LONG_TEST(atomic_against_processors, 120)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .send_wr = 64);
	struct adding adding = { .word = (uint64_t *)p.mr[1].p };
	const uint64_t count = 20000;
	uint64_t posted = 0, polled = 0, last = 0;
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, adder, &adding) == 0);
	while (polled < count) {
		struct ibv_wc wc[16];
		int n;

		while (posted < count && posted < polled + 32) {
			POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = posted, .from = &p.mr[0],
			     .offset = 8 * (posted % 64), .length = 8, .to = &p.mr[1], .compare_add = 1ull << 32);
			posted++;
		}
		n = ibv_poll_cq(p.cq[0], 16, wc);
		for (int i = 0; i < n; i++) {
			uint64_t old = ((uint64_t *)p.mr[0].p)[polled % 64];

			EQ(wc[i].status, IBV_WC_SUCCESS);
			EQ(wc[i].wr_id, polled);
			/* Each saw those of the device before it. */
			EQ(old >> 32, polled);
			CHECK(old >= last);
			last = old;
			polled++;
		}
	}
	__atomic_store_n(&adding.stop, true, __ATOMIC_SEQ_CST);
	CHECK(pthread_join(thread, NULL) == 0);
	uint64_t value = __atomic_load_n(adding.word, __ATOMIC_SEQ_CST);
	EQ(value >> 32, count);
	EQ(value & 0xffffffff, adding.added & 0xffffffff);
	CHECK(adding.added > 0);
}

/* A lock that processors take with compare and exchange, and the peer with compare and swap. */

struct locking {
	volatile uint64_t *lock, *guarded;
	unsigned int rounds;
	bool stop;
};

static void *locker(void *argument)
{
	struct locking *locking = argument;

	for (; !__atomic_load_n(&locking->stop, __ATOMIC_RELAXED); locking->rounds++) {
		uint64_t free = 0;

		while (!__atomic_compare_exchange_n(locking->lock, &free, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
			free = 0;
			sched_yield();
		}
		*locking->guarded = *locking->guarded + 1;
		__atomic_store_n(locking->lock, 0, __ATOMIC_SEQ_CST);
	}
	return NULL;
}

LONG_TEST(atomic_lock_shared_with_processors, 120)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	volatile uint64_t *words = (uint64_t *)p.mr[1].p, *mine = (uint64_t *)p.mr[0].p;
	struct locking locking = { .lock = &words[0], .guarded = &words[8] };
	unsigned int rounds;
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, locker, &locking) == 0);
	/* Until the thread had its turns, too: on one processor it may wait for them. */
	for (rounds = 0; rounds < 500 || __atomic_load_n(&locking.rounds, __ATOMIC_RELAXED) < 5; rounds++) {
		do {
			POST(p.qp[0], .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
			     .compare_add = 0, .swap = 2);
			expect_ok(p.cq[0], 1, COMP_SWAP);
		} while (mine[0] != 0);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .offset = 64, .length = 8, .to = &p.mr[1],
		     .to_offset = 64);
		expect_ok(p.cq[0], 2, RDMA_READ);
		mine[8]++;
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .offset = 64, .length = 8, .to = &p.mr[1],
		     .to_offset = 64, .unsignaled = true);
		POST(p.qp[0], .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .id = 4, .from = &p.mr[0], .offset = 128, .length = 8,
		     .to = &p.mr[1], .compare_add = 2, .swap = 0);
		expect_ok(p.cq[0], 4, COMP_SWAP);
		EQ(mine[16], 2);
		sched_yield();
	}
	__atomic_store_n(&locking.stop, true, __ATOMIC_SEQ_CST);
	CHECK(pthread_join(thread, NULL) == 0);
	EQ(words[8], rounds + locking.rounds);
	EQ(dev.orig_attr.atomic_cap, IBV_ATOMIC_GLOB);
}

/* Results go to several places, too. */
TEST(atomic_scattered_result)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_sge list[2] = { sge(&p.mr[0], 3, 5), sge(&p.mr[0], 100, 3) };
	uint64_t old = 0x0807060504030201;

	*(uint64_t *)p.mr[1].p = old;
	int error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 1, .list = list, .num_sge = 2,
						.to = &p.mr[1], .compare_add = 1 });
	/* Devices may want one place. */
	if (error)
		skip("one scatter/gather entry only");
	expect_ok(p.cq[0], 1, FETCH_ADD);
	CHECK(memcmp(p.mr[0].p + 3, &old, 5) == 0 && memcmp(p.mr[0].p + 100, (uint8_t *)&old + 5, 3) == 0);
}

/* Masked atomic operations. */

static struct pair make_masked(void)
{
	struct virtio_rdma_dv_device_attr caps = { .device_caps = 0 };
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct conn usual = conn(0);
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = p.cq[0],
		.recv_cq = p.cq[0],
		.cap = { .max_send_wr = 32, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = p.pd[0],
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct virtio_rdma_dv_qp_init_attr more = {
		.send_ops_flags = VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_CMP_AND_SWP |
				  VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_FETCH_AND_ADD,
	};
	int error = virtio_rdma_dv_query_device(ctx, &caps, sizeof(caps));

	if (error == EOPNOTSUPP)
		skip("not a device with virtio_rdma_dv");
	EQ(error, 0);
	if (!(caps.device_caps & VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_MASKED_ATOMICS))
		skip("the device has no masked atomic operations");
	OK(ibv_destroy_qp(p.qp[0]));
	p.qp[0] = MAKE(virtio_rdma_dv_create_qp(ctx, &attr, &more, sizeof(more)));
	connect_pair(&p, &usual);
	return p;
}

/* Returns the value before, and checks the one after it. */
static uint64_t cmp_swp(struct pair *p, uint64_t value, uint64_t compare, uint64_t swap, uint64_t compare_mask, uint64_t swap_mask)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p->qp[0]);
	uint64_t *word = (uint64_t *)p->mr[1].p, after = value;

	*word = value;
	if (((value ^ compare) & compare_mask) == 0)
		after = (value & ~swap_mask) | (swap & swap_mask);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	virtio_rdma_dv_wr_masked_cmp_swp(ex, p->mr[1].mr->rkey, (uintptr_t)word, compare, swap, compare_mask, swap_mask);
	ibv_wr_set_sge(ex, p->mr[0].mr->lkey, (uintptr_t)p->mr[0].p, 8);
	OK(ibv_wr_complete(ex));
	EQ(expect_ok(p->cq[0], 1, COMP_SWAP).byte_len, 8);
	EQ(*word, after);
	return *(uint64_t *)p->mr[0].p;
}

TEST(masked_compare_and_swap)
{
	struct pair p = make_masked();

	EQ(cmp_swp(&p, 0x1122334455667788, 0x1122334455667788, 7, ~0ull, ~0ull), 0x1122334455667788);
	EQ(cmp_swp(&p, 5, 6, 7, ~0ull, ~0ull), 5);
	/* Equal in what is compared, swapped in part. */
	EQ(cmp_swp(&p, 0x1122334455667788, 0xff, 0xffffffffffffffff, 0, 0xff00), 0x1122334455667788);
	cmp_swp(&p, 0x1122334455667788, 0xaa22bbccddeeff88, 0, 0x00ff0000000000ff, 0xffff);
	cmp_swp(&p, 0x1122334455667788, 0xaa23bbccddeeff88, 0, 0x00ff0000000000ff, 0xffff);
	cmp_swp(&p, 0x1122334455667788, 0, 1, 0, 0);
	for (uint64_t i = 1; i; i <<= 1) {
		cmp_swp(&p, ~i, ~0ull, i, ~i, i);
		cmp_swp(&p, ~i, ~0ull, i, i, i);
	}
}

static uint64_t fetch_add(struct pair *p, uint64_t value, uint64_t add, uint64_t boundary)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p->qp[0]);
	uint64_t *word = (uint64_t *)p->mr[1].p;

	*word = value;
	ibv_wr_start(ex);
	ex->wr_id = 2;
	ex->wr_flags = IBV_SEND_SIGNALED;
	virtio_rdma_dv_wr_masked_fetch_add(ex, p->mr[1].mr->rkey, (uintptr_t)word, add, boundary);
	ibv_wr_set_sge(ex, p->mr[0].mr->lkey, (uintptr_t)p->mr[0].p, 8);
	OK(ibv_wr_complete(ex));
	expect_ok(p->cq[0], 2, FETCH_ADD);
	EQ(*(uint64_t *)p->mr[0].p, value);
	return *word;
}

TEST(masked_fetch_and_add)
{
	struct pair p = make_masked();

	EQ(fetch_add(&p, 40, 2, 0), 42);
	EQ(fetch_add(&p, ~0ull, 2, 0), 1);
	/* Four fields of 16 bits: each wraps for itself. */
	EQ(fetch_add(&p, 0xffff0001ffff7fff, 0x0001000100010001, 0x8000800080008000), 0x0000000200008000);
	EQ(fetch_add(&p, 0xffffffffffffffff, 0xffffffffffffffff, 0x8000800080008000), 0xfffefffefffefffe);
	/* All fields of one bit: exclusive or. */
	EQ(fetch_add(&p, 0x5555aaaa0f0ff0f0, 0xffff00003333cccc, ~0ull), 0xaaaaaaaa3c3c3c3c);
	/* The highest bit as a boundary changes nothing. */
	EQ(fetch_add(&p, 0xfffffffffffffff0, 0x20, 1ull << 63), 0x10);
	/* The lowest bit for itself. */
	EQ(fetch_add(&p, 1, 1, 1), 0);
	EQ(fetch_add(&p, 3, 3, 1), 4);
}

/* They obey the same rules. */
TEST(masked_errors)
{
	struct pair p = make_masked();
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p.qp[0]);
	struct ibv_sge two[2] = { sge(&p.mr[0], 0, 4), sge(&p.mr[0], 8, 4) };

	ibv_wr_start(ex);
	virtio_rdma_dv_wr_masked_fetch_add(ex, p.mr[1].mr->rkey, (uintptr_t)p.mr[1].p, 1, 0);
	ibv_wr_set_sge_list(ex, 2, two);
	EQ(ibv_wr_complete(ex), EINVAL);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	virtio_rdma_dv_wr_masked_cmp_swp(ex, p.mr[1].mr->rkey, (uintptr_t)p.mr[1].p + 4, 0, 1, ~0ull, ~0ull);
	ibv_wr_set_sge(ex, p.mr[0].mr->lkey, (uintptr_t)p.mr[0].p, 8);
	OK(ibv_wr_complete(ex));
	expect_error(p.cq[0], 1, REM_INV_REQ_ERR);
	wait_event(QP_REQ_ERR);
	EQ(*(uint64_t *)(p.mr[1].p + 4), 0);
	/* A queue pair that was not made for them. */
	struct pair plain = PAIR(.type = IBV_QPT_RC, .ops = IBV_QP_EX_WITH_RDMA_WRITE);
	ex = ibv_qp_to_qp_ex(plain.qp[0]);
	ibv_wr_start(ex);
	virtio_rdma_dv_wr_masked_fetch_add(ex, plain.mr[1].mr->rkey, (uintptr_t)plain.mr[1].p, 1, 0);
	ibv_wr_set_sge(ex, plain.mr[0].mr->lkey, (uintptr_t)plain.mr[0].p, 8);
	EQ(ibv_wr_complete(ex), EINVAL);
	expect_none(plain.cq[0]);
	EQ(*(uint64_t *)plain.mr[1].p, 0);
}

/* ATOMIC_WRITE and FLUSH. */

TEST(atomic_write)
{
	struct pair p;

	if (!(dev.device_cap_flags_ex & IB_UVERBS_DEVICE_ATOMIC_WRITE))
		skip("the device has no ATOMIC_WRITE");
	p = PAIR(.type = IBV_QPT_RC, .ops = IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_RDMA_WRITE);
	for (uint64_t i = 1; i < 50; i++) {
		POST(p.qp[0], .opcode = IBV_WR_ATOMIC_WRITE, .id = i, .swap = i * 0x0101010101010101, .to = &p.mr[1], .to_offset = 8 * i,
		     .ex = true);
		expect_ok(p.cq[0], i, ATOMIC_WRITE);
		EQ(((uint64_t *)p.mr[1].p)[i], i * 0x0101010101010101);
	}
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_WRITE, .id = 99, .swap = 1, .to = &p.mr[1], .to_offset = 4, .ex = true);
	expect_error(p.cq[0], 99, REM_INV_REQ_ERR);
	wait_event(QP_REQ_ERR);
	EQ(((uint64_t *)p.mr[1].p)[0], 0);
}

/* It needs the right to write. */
TEST(atomic_write_access)
{
	struct pair p;

	if (!(dev.device_cap_flags_ex & IB_UVERBS_DEVICE_ATOMIC_WRITE))
		skip("the device has no ATOMIC_WRITE");
	p = PAIR(.type = IBV_QPT_RC, .ops = IBV_QP_EX_WITH_ATOMIC_WRITE, .mr_access = LOCAL | IBV_ACCESS_REMOTE_ATOMIC);
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_WRITE, .id = 1, .swap = 1, .to = &p.mr[1], .ex = true);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
}

static struct pair flushable(int access)
{
	struct conn how = conn(0);

	if (!(dev.device_cap_flags_ex & IB_UVERBS_DEVICE_FLUSH_GLOBAL))
		skip("the device has no FLUSH");
	how.access |= IBV_ACCESS_FLUSH_GLOBAL;
	return PAIR(.type = IBV_QPT_RC, .ops = IBV_QP_EX_WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE, .mr_access = access, .conn = &how);
}

TEST(flush_global)
{
	struct pair p = flushable(ALL | IBV_ACCESS_FLUSH_GLOBAL);

	fill(p.mr[0].p, 8192, 1);
	for (uint64_t i = 0; i < 10; i++) {
		memset(p.mr[1].p, 0, 8192);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8192, .to = &p.mr[1],
		     .unsignaled = true, .ex = true);
		POST(p.qp[0], .opcode = IBV_WR_FLUSH, .id = i, .length = i & 1 ? 0 : 8192, .to = &p.mr[1], .flush_type = IBV_FLUSH_GLOBAL,
		     .flush_level = i & 1 ? IBV_FLUSH_MR : IBV_FLUSH_RANGE, .ex = true);
		expect_ok(p.cq[0], i, FLUSH);
		CHECK(filled(p.mr[1].p, 8192, 1));
	}
}

TEST(flush_without_right)
{
	struct pair p = flushable(ALL);

	POST(p.qp[0], .opcode = IBV_WR_FLUSH, .id = 1, .length = 64, .to = &p.mr[1], .flush_type = IBV_FLUSH_GLOBAL,
	     .flush_level = IBV_FLUSH_RANGE, .ex = true);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
}

TEST(flush_out_of_range)
{
	struct pair p = flushable(ALL | IBV_ACCESS_FLUSH_GLOBAL);

	POST(p.qp[0], .opcode = IBV_WR_FLUSH, .id = 1, .length = 64, .to = &p.mr[1], .to_offset = 16384 - 63,
	     .flush_type = IBV_FLUSH_GLOBAL, .flush_level = IBV_FLUSH_RANGE, .ex = true);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
}

/* There is no persistent memory here. */
TEST(flush_persistent_is_refused)
{
	struct pair p = flushable(ALL | IBV_ACCESS_FLUSH_GLOBAL);

	if (dev.device_cap_flags_ex & IB_UVERBS_DEVICE_FLUSH_PERSISTENT)
		skip("the device has persistent memory");
	CHECK(!ibv_reg_mr(p.pd[1], pages(4096), 4096, ALL | IBV_ACCESS_FLUSH_PERSISTENT));
	POST(p.qp[0], .opcode = IBV_WR_FLUSH, .id = 1, .length = 64, .to = &p.mr[1], .flush_type = IBV_FLUSH_PERSISTENT,
	     .flush_level = IBV_FLUSH_RANGE, .ex = true);
	expect_error(p.cq[0], 1, REM_ACCESS_ERR);
}
