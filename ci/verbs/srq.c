// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Shared receive queues. */
#include "verbs-test.h"

static struct ibv_srq *make_srq(struct ibv_pd *pd, uint32_t max_wr, uint32_t limit)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = max_wr, .max_sge = 2, .srq_limit = limit } };
	struct ibv_srq *srq = MAKE(ibv_create_srq(pd, &attr));

	CHECK(attr.attr.max_wr >= max_wr && attr.attr.max_sge >= 2);
	return srq;
}

/* Two pairs whose second queue pairs share receives, of a protection domain of its own. */
struct shared {
	struct ibv_pd *pd;
	struct ibv_srq *srq;
	struct region mr;
	struct pair p[2];
};

static struct shared make_shared(uint32_t max_wr, const struct conn *how)
{
	struct shared s;

	s.pd = MAKE(ibv_alloc_pd(ctx));
	s.srq = make_srq(s.pd, max_wr, 0);
	s.mr = region(s.pd, 65536, ALL);
	for (int i = 0; i < 2; i++)
		s.p[i] = PAIR(.type = IBV_QPT_RC, .srq = s.srq, .conn = how);
	return s;
}

TEST(srq_shared_by_two)
{
	struct shared s = make_shared(32, NULL);

	for (int i = 0; i < 8; i++)
		OK(post_srq(s.srq, i, &s.mr, 1024 * i, 1024));
	for (int i = 0; i < 8; i++) {
		struct pair *p = &s.p[i & 1];

		fill(p->mr[0].p, 500, i);
		POST(p->qp[0], .opcode = IBV_WR_SEND, .id = i, .from = &p->mr[0], .length = 500);
		expect_ok(p->cq[0], i, SEND);
		struct ibv_wc wc = expect_ok(p->cq[1], i, RECV);
		EQ(wc.qp_num, p->qp[1]->qp_num);
		CHECK(filled(s.mr.p + 1024 * i, 500, i));
	}
	/* Messages to both wait for the receives that come. */
	for (int i = 0; i < 2; i++)
		POST(s.p[i].qp[0], .opcode = IBV_WR_SEND, .id = 20 + i, .from = &s.p[i].mr[0], .length = 100);
	expect_none(s.p[0].cq[0]);
	for (int i = 0; i < 2; i++)
		OK(post_srq(s.srq, 30 + i, &s.mr, 0, 1024));
	for (int i = 0; i < 2; i++)
		expect_ok(s.p[i].cq[0], 20 + i, SEND);
	uint64_t sum = wait_wc(s.p[0].cq[1]).wr_id + wait_wc(s.p[1].cq[1]).wr_id;
	EQ(sum, 61);
}

TEST(srq_limit_event)
{
	struct shared s = make_shared(32, NULL);
	struct ibv_srq_attr attr = { .srq_limit = 3 };

	for (int i = 0; i < 6; i++)
		OK(post_srq(s.srq, i, &s.mr, 0, 64));
	OK(ibv_modify_srq(s.srq, &attr, IBV_SRQ_LIMIT));
	memset(&attr, 0xff, sizeof(attr));
	OK(ibv_query_srq(s.srq, &attr));
	EQ(attr.srq_limit, 3);
	CHECK(attr.max_wr >= 32 && attr.max_sge >= 2);
	for (int i = 0; i < 3; i++) {
		POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = i, .from = &s.p[0].mr[0], .length = 8);
		expect_ok(s.p[0].cq[0], i, SEND);
	}
	/* Three are left: not fewer than the limit. */
	no_event();
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 3, .from = &s.p[0].mr[0], .length = 8);
	expect_ok(s.p[0].cq[0], 3, SEND);
	CHECK(wait_event(SRQ_LIMIT_REACHED).element.srq == s.srq);
	/* Once. */
	OK(ibv_query_srq(s.srq, &attr));
	EQ(attr.srq_limit, 0);
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 4, .from = &s.p[0].mr[0], .length = 8);
	expect_ok(s.p[0].cq[0], 4, SEND);
	no_event();
	/* Until it is armed again. */
	for (int i = 0; i < 4; i++)
		OK(post_srq(s.srq, i, &s.mr, 0, 64));
	attr.srq_limit = 5;
	OK(ibv_modify_srq(s.srq, &attr, IBV_SRQ_LIMIT));
	POST(s.p[1].qp[0], .opcode = IBV_WR_SEND, .id = 5, .from = &s.p[1].mr[0], .length = 8);
	expect_ok(s.p[1].cq[0], 5, SEND);
	CHECK(wait_event(SRQ_LIMIT_REACHED).element.srq == s.srq);
}

TEST(srq_resize)
{
	struct shared s = make_shared(16, NULL);
	struct ibv_srq_attr attr = { .max_wr = 100 };
	unsigned int posted = 0, taken = 0;

	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_SRQ_RESIZE)) {
		CHECK(ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR) != 0);
		skip("the device does not resize SRQs");
	}
	while (post_srq(s.srq, posted, &s.mr, 64 * (posted % 512), 64) == 0)
		posted++;
	CHECK(posted >= 16);
	for (; taken < 5; taken++) {
		POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = taken, .from = &s.p[0].mr[0], .length = 8);
		expect_ok(s.p[0].cq[0], taken, SEND);
		expect_ok(s.p[0].cq[1], taken, RECV);
	}
	OK(ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR));
	OK(ibv_query_srq(s.srq, &attr));
	CHECK(attr.max_wr >= 100);
	for (; posted - taken < 100; posted++)
		OK(post_srq(s.srq, posted, &s.mr, 64 * (posted % 512), 64));
	/* Not smaller than what is in it, nor larger than the most. */
	attr.max_wr = 50;
	FAILS(EINVAL, ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR));
	attr.max_wr = dev.orig_attr.max_srq_wr + 1;
	FAILS(EINVAL, ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR));
	for (; taken < posted; taken++) {
		struct pair *p = &s.p[taken & 1];

		*(uint64_t *)p->mr[0].p = taken;
		POST(p->qp[0], .opcode = IBV_WR_SEND, .id = taken, .from = &p->mr[0], .length = 8);
		expect_ok(p->cq[0], taken, SEND);
		expect_ok(p->cq[1], taken, RECV);
		EQ(*(uint64_t *)(s.mr.p + 64 * (taken % 512)), taken);
	}
	attr.max_wr = 16;
	OK(ibv_modify_srq(s.srq, &attr, IBV_SRQ_MAX_WR));
	OK(post_srq(s.srq, 1, &s.mr, 0, 64));
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &s.p[0].mr[0], .length = 8);
	expect_ok(s.p[0].cq[0], 2, SEND);
	expect_ok(s.p[0].cq[1], 1, RECV);
	no_event();
}

TEST(srq_full)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_srq *srq = make_srq(pd, 16, 0);
	struct region mr = region(pd, 4096, ALL);
	struct ibv_srq_attr attr;
	unsigned int posted = 0;
	int error;

	OK(ibv_query_srq(srq, &attr));
	while (!(error = post_srq(srq, posted, &mr, 0, 8)))
		CHECK(++posted <= attr.max_wr);
	EQ(error, ENOMEM);
	CHECK(posted >= 16);
}

TEST(srq_bad_parameters)
{
	struct shared s = make_shared(16, NULL);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = dev.orig_attr.max_srq_wr + 1, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .srq_limit = 100000 };
	struct ibv_recv_wr *bad, wr = { .wr_id = 1 };
	struct ibv_sge list[64];

	MAKE_FAILS(EINVAL, ibv_create_srq(s.pd, &init));
	init.attr = (struct ibv_srq_attr){ .max_wr = 1, .max_sge = dev.orig_attr.max_srq_sge + 1 };
	MAKE_FAILS(EINVAL, ibv_create_srq(s.pd, &init));
	FAILS(EINVAL, ibv_modify_srq(s.srq, &attr, IBV_SRQ_LIMIT));
	/* In use. */
	FAILS(EBUSY, ibv_destroy_srq(s.srq));
	FAILS(EBUSY, ibv_dealloc_pd(s.pd));
	/* A queue pair with a shared queue has none of its own. */
	FAILS(EINVAL, ibv_post_recv(s.p[0].qp[1], &wr, &bad));
	for (int i = 0; i < 64; i++)
		list[i] = sge(&s.mr, 0, 1);
	wr.sg_list = list;
	wr.num_sge = 64;
	CHECK(ibv_post_srq_recv(s.srq, &wr, &bad) != 0 && bad == &wr);
}

/*
 * When a queue pair with a shared queue goes to the error state, it says when it takes no more of
 * it.
 */
TEST(srq_last_wqe_reached)
{
	struct shared s = make_shared(16, NULL);

	for (int i = 0; i < 4; i++)
		OK(post_srq(s.srq, i, &s.mr, 0, 64));
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &s.p[0].mr[0], .length = 8);
	expect_ok(s.p[0].cq[0], 1, SEND);
	expect_ok(s.p[0].cq[1], 0, RECV);
	set_state(s.p[0].qp[1], IBV_QPS_ERR);
	CHECK(wait_event(QP_LAST_WQE_REACHED).element.qp == s.p[0].qp[1]);
	/* What is in the shared queue is not flushed. */
	expect_none(s.p[0].cq[1]);
	POST(s.p[1].qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &s.p[1].mr[0], .length = 8);
	expect_ok(s.p[1].cq[0], 2, SEND);
	expect_ok(s.p[1].cq[1], 1, RECV);
	no_event();
	/* By an error of the queue pair, too. */
	POST(s.p[1].qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &s.p[1].mr[0], .length = 8, .addr = 0, .rkey = 0);
	expect_error(s.p[1].cq[0], 3, REM_ACCESS_ERR);
	/* Both of the pair have the shared queue. */
	int access = 0, last[2] = { 0 };
	for (int i = 0; i < 3; i++) {
		struct ibv_async_event event;

		OK(ibv_get_async_event(ctx, &event));
		if (event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == s.p[1].qp[1])
			access++;
		for (int j = 0; j < 2; j++)
			if (event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == s.p[1].qp[j])
				last[j]++;
		ibv_ack_async_event(&event);
	}
	CHECK(access == 1 && last[0] == 1 && last[1] == 1);
	no_event();
}

/* Keys of shared receives are of the shared queue's domain, not the queue pair's. */
TEST(srq_keys_are_of_its_pd)
{
	struct shared s = make_shared(16, NULL);

	OK(post_srq(s.srq, 1, &s.p[0].mr[1], 0, 64));
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &s.p[0].mr[0], .length = 8);
	expect_error(s.p[0].cq[0], 1, REM_OP_ERR);
	expect_error(s.p[0].cq[1], 1, LOC_PROT_ERR);
	/* The other goes on. */
	OK(post_srq(s.srq, 2, &s.mr, 0, 64));
	POST(s.p[1].qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &s.p[1].mr[0], .length = 8);
	expect_ok(s.p[1].cq[0], 2, SEND);
	expect_ok(s.p[1].cq[1], 2, RECV);
}

TEST(srq_rnr)
{
	struct conn how = conn(0);

	how.rnr_retry = 1;
	how.min_rnr_timer = 10;
	struct shared s = make_shared(16, &how);
	POST(s.p[0].qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &s.p[0].mr[0], .length = 8);
	expect_error(s.p[0].cq[0], 1, RNR_RETRY_EXC_ERR);
}

/* Datagrams and UC from a shared queue. */
static void other_type(enum ibv_qp_type type)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_srq *srq = make_srq(pd, 16, 0);
	struct region mr = region(pd, 4096, ALL);
	struct pair p = PAIR(.type = type, .srq = srq);
	struct ibv_ah_attr path = path_to(gid);
	struct ibv_ah *ah = MAKE(ibv_create_ah(p.pd[0], &path));
	uint32_t grh = type == IBV_QPT_UD ? 40 : 0;

	for (int i = 0; i < 4; i++)
		OK(post_srq(srq, i, &mr, 1024 * i, 1024));
	fill(p.mr[0].p, 500, 1);
	for (int i = 0; i < 4; i++) {
		POST(p.qp[0], .opcode = IBV_WR_SEND, .id = i, .from = &p.mr[0], .length = 500, .ah = ah, .qpn = p.qp[1]->qp_num,
		     .qkey = QKEY);
		expect_ok(p.cq[0], i, SEND);
		EQ(expect_ok(p.cq[1], i, RECV).byte_len, grh + 500);
		CHECK(filled(mr.p + 1024 * i + grh, 500, 1));
	}
	/* Lost without one. */
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 9, .from = &p.mr[0], .length = 500, .ah = ah, .qpn = p.qp[1]->qp_num,
	     .qkey = QKEY);
	expect_ok(p.cq[0], 9, SEND);
	expect_none(p.cq[1]);
}

TEST(srq_uc)
{
	other_type(IBV_QPT_UC);
}

TEST(srq_ud)
{
	other_type(IBV_QPT_UD);
}
